"""Laws of the metrics: counts are shown, states add up, and Prometheus' own lint has no complaint."""

import asyncio
import subprocess
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvleased.core.lease.phases import End
from kvleased.metrics import BUCKETS, STATES, Metrics
from kvleased.metrics.calls import Places
from kvleased.metrics.catalogue import BY_NAME
from kvleased.metrics.definitions import Kind
from tests.servers import debian
from tests.unit.api.surveyed import (
    LIMITS,
    MOVER,
    SURVEY,
    SURVEYED,
)


@pytest.fixture
def metrics() -> Metrics:
    """Metrics of one cache, with some calls and copies counted."""
    counted = Metrics()
    counted.epoch = 9
    counted.watch_caches(lambda: [SURVEYED])
    counted.watch_movers(lambda: {"disk": MOVER})
    counted.watch_readiness(lambda: False)
    for seconds in (10e-6, 60e-6, 50e-6, 9.0):
        counted.observe("reserve", "local", "OK", seconds)
    counted.observe("reserve", "rest", "POOL_FULL", 1e-3)
    counted.copied("device_to_host", 4096, 0.5, ok=True)
    counted.copied("device_to_host", 100, 0.5, ok=False)
    return counted


def samples(metrics: Metrics) -> Mapping[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """Return one sample."""
    return samples(metrics)[name, frozenset(labels.items())]


def test_magazines_are_told_apart(metrics: Metrics) -> None:
    """Each magazine is shown by its place, with its private blocks and those that it holds."""
    of_one = {"cache": "demo", "magazine": "2"}

    assert value(metrics, "kvlease_magazine_blocks", **of_one, state="private") == 5
    assert value(metrics, "kvlease_magazine_blocks", **of_one, state="held") == 7


def test_states_add_up_to_the_pool(metrics: Metrics) -> None:
    """The sum over states is the capacity, in blocks and bytes; held blocks are not counted twice."""
    found = samples(metrics).items()
    for name, each in (("kvlease_blocks", 1), ("kvlease_pool_bytes", 4096)):
        device = [
            number for (one, labels), number in found
            if one == name and ("tier", "device") in labels
        ]  # fmt: skip
        assert sum(device) == 2 * len(STATES) * each

    assert value(metrics, "kvlease_blocks_held", cache="demo", tier="device") == 1
    assert value(metrics, "kvlease_available_blocks", cache="demo") == 9


def test_leases_and_their_ends_add_up_to_the_grants(metrics: Metrics) -> None:
    """Leases granted or taken over from an earlier life are as many as those alive and those ended, for all reasons."""
    ended = {
        dict(labels)["reason"]: number
        for (one, labels), number in samples(metrics).items()
        if one == "kvlease_leases_ended_total"
    }
    live = sum(SURVEY.phases.values())
    granted = value(metrics, "kvlease_leases_granted_total", cache="demo")
    recovered = value(metrics, "kvlease_leases_recovered_total", cache="demo")

    assert ended == {one.value: 0 for one in End} | {"released": 3, "died": 1, "detached": 1}
    assert granted + recovered == live + sum(ended.values())


def test_tiers_tell_whether_they_work(metrics: Metrics) -> None:
    """A tier that is off differs from a tier that the cache does not have."""
    found = samples(metrics)

    assert value(metrics, "kvlease_tier_up", cache="demo", tier="host") == 1
    assert value(metrics, "kvlease_tier_up", cache="demo", tier="disk") == 0
    assert ("kvlease_tier_up", frozenset({("cache", "demo"), ("tier", "remote")})) not in found
    assert value(metrics, "kvlease_blocks", cache="demo", tier="disk", state="ready") == 2


def test_queues_of_movers_are_shown(metrics: Metrics) -> None:
    """Batches are shown by mover: those that it works on apart from those that wait for it."""
    assert value(metrics, "kvlease_mover_queue", mover="disk", state="waiting") == 3
    assert value(metrics, "kvlease_mover_queue", mover="disk", state="sent") == 2
    assert value(metrics, "kvlease_mover_oldest_seconds", mover="disk") == 0.5
    assert value(metrics, "kvlease_copies_in_flight", cache="demo") == 4


def test_calls_are_counted_by_code(metrics: Metrics) -> None:
    """Each answered call counts once, under its verb, transport and code."""
    name = "kvlease_requests_total"

    assert value(metrics, name, verb="reserve", transport="local", code="OK") == 4
    assert value(metrics, name, verb="reserve", transport="rest", code="POOL_FULL") == 1


def test_buckets_hold_what_is_not_slower(metrics: Metrics) -> None:
    """A call exactly as slow as a bound is inside it, and the last bucket holds all calls."""
    name, labels = "kvlease_request_seconds_bucket", {"verb": "reserve", "transport": "local"}

    assert value(metrics, name, le=str(BUCKETS[0]), **labels) == 2
    assert value(metrics, name, le=str(BUCKETS[1]), **labels) == 3
    assert value(metrics, name, le="+Inf", **labels) == 4
    assert value(metrics, "kvlease_request_seconds_count", **labels) == 4


def test_snapshot_is_shown(metrics: Metrics) -> None:
    """The core's gauges and counters have the names that operators know."""
    assert value(metrics, "kvlease_waiting_requests", cache="demo", priority="high") == 1
    assert value(metrics, "kvlease_waiting_requests", cache="demo", priority="low") == 0
    assert value(metrics, "kvlease_waiting_oldest_seconds", cache="demo") == 0.25
    assert value(metrics, "kvlease_workers", cache="demo") == 2
    assert value(metrics, "kvlease_blocks_forked_total", cache="demo") == 4
    assert value(metrics, "kvlease_prefix_tokens_total", cache="demo", outcome="device_hit") == 64
    assert value(metrics, "kvlease_prefix_tokens_total", cache="demo", outcome="computed") == 0
    assert value(metrics, "kvlease_step_refusals_total", cache="demo", code="POOL_FULL") == 6
    assert (
        value(metrics, "kvlease_copy_bytes_total", direction="device_to_host", result="ok") == 4096
    )
    assert value(metrics, "kvlease_epoch") == 9
    assert value(metrics, "kvlease_ready") == 0


def test_leases_are_shown_by_phase_and_age(metrics: Metrics) -> None:
    """The phases add up to the leases; the ages are those of the leases in the middle, near the end and at the end."""
    assert value(metrics, "kvlease_leases", cache="demo", phase="active") == 2
    assert value(metrics, "kvlease_leases_max", cache="demo") == 1024
    assert value(metrics, "kvlease_quarantined_oldest_seconds", cache="demo") == 8
    for statistic, seconds in (("median", 2), ("p95", 30), ("oldest", 30)):
        name = "kvlease_lease_age_seconds"
        assert value(metrics, name, cache="demo", statistic=statistic) == seconds


def test_ages_of_no_leases_are_zero(metrics: Metrics) -> None:
    """Without leases no age is missing."""
    bare = replace(SURVEYED, survey=replace(SURVEY, lease_seconds=np.empty(0)))
    metrics.watch_caches(lambda: [bare])

    assert value(metrics, "kvlease_lease_age_seconds", cache="demo", statistic="oldest") == 0


def test_blocks_of_tenants_are_shown(metrics: Metrics) -> None:
    """Cached and held blocks add up to a tenant's use, in blocks and bytes; a tenant without blocks is not shown."""
    labels = {"cache": "demo", "tier": "device", "tenant": "chat"}

    assert value(metrics, "kvlease_tenant_blocks", **labels, state="cached") == 1
    assert value(metrics, "kvlease_tenant_blocks", **labels, state="held") == 2
    assert value(metrics, "kvlease_tenant_bytes", **labels, state="held") == 2 * 4096
    assert value(metrics, "kvlease_tenant_pinned_blocks", cache="demo", tenant="chat") == 1
    assert (
        value(metrics, "kvlease_tenant_limit_blocks", cache="demo", tenant="chat", limit="min") == 2
    )
    assert (
        value(metrics, "kvlease_tenant_limit_blocks", cache="demo", tenant="chat", limit="max")
        == 12
    )
    assert "(others)" not in metrics.render().decode()


def test_leases_of_tenants_are_shown(metrics: Metrics) -> None:
    """A tenant's leases stand beside its limit; the leases of all nameless tenants are one number."""
    strangers = [replace(LIMITS, tenant_digest=digest, num_leases=digest) for digest in (1, 2)]
    several = replace(SURVEYED, survey=replace(SURVEY, tenants=(LIMITS, *strangers)))
    metrics.watch_caches(lambda: [several])

    name = "kvlease_tenant_leases"
    assert value(metrics, name, cache="demo", tenant="chat") == LIMITS.num_leases
    assert value(metrics, name, cache="demo", tenant="(others)") == 3
    most = value(metrics, "kvlease_tenant_leases_max", cache="demo", tenant="chat")
    assert most == LIMITS.leases_max


def test_pins_of_nameless_tenants_are_shown(metrics: Metrics) -> None:
    """Pins outlive workers, so what they hold of nameless tenants is one number, as their blocks are."""
    strangers = [replace(LIMITS, tenant_digest=digest, pinned_blocks=digest) for digest in (1, 2)]
    several = replace(SURVEYED, survey=replace(SURVEY, tenants=(LIMITS, *strangers)))
    metrics.watch_caches(lambda: [several])

    name = "kvlease_tenant_pinned_blocks"
    assert value(metrics, name, cache="demo", tenant="chat") == LIMITS.pinned_blocks
    assert value(metrics, name, cache="demo", tenant="(others)") == 3


def test_drain_is_shown(metrics: Metrics) -> None:
    """A cache that grants nothing new is shown as drained."""
    assert value(metrics, "kvlease_draining", cache="demo") == 1
    metrics.watch_caches(lambda: [replace(SURVEYED, is_draining=False)])
    assert value(metrics, "kvlease_draining", cache="demo") == 0


def test_stale_credentials_are_shown(metrics: Metrics) -> None:
    """Credentials that could not be reloaded differ from those that are in force as they are on disk."""
    metrics.watch_credentials(lambda: {"tokens": True, "certificate": False})

    assert value(metrics, "kvlease_credentials_stale", what="tokens") == 1
    assert value(metrics, "kvlease_credentials_stale", what="certificate") == 0


def test_end_of_the_certificate_is_shown(metrics: Metrics) -> None:
    """The end is a point in time, so that an alert can come long before it; without TLS there is none."""
    assert "\nkvlease_certificate_expires_timestamp_seconds" not in metrics.render().decode()

    metrics.certificate_expires_at = 1.9e9

    assert value(metrics, "kvlease_certificate_expires_timestamp_seconds") == 1.9e9


def test_ends_of_processes_are_counted(metrics: Metrics) -> None:
    """Ends of control processes are counted by the reason for the restart, ends of movers by what they copy."""
    metrics.control_restarts = {"ended": 2, "silent": 1}
    metrics.watch_mover_ends(lambda: {"memory": 3})

    assert value(metrics, "kvlease_control_restarts_total", reason="silent") == 1
    assert value(metrics, "kvlease_mover_ends_total", mover="memory") == 3


def test_memory_of_pools_is_shown_beside_what_is_used(metrics: Metrics) -> None:
    """A metric tells how much of the used memory is that of pools, which was promised and does not grow."""
    metrics.watch_memory(lambda: 5)

    assert value(metrics, "kvlease_memory_pools_bytes") == 5


def test_places_are_shown_beside_their_limits(metrics: Metrics) -> None:
    """A metric shows how near the places are to their limits, before a caller is turned away."""
    metrics.watch_places(
        lambda: Places(
            connections={"local": 7},
            connections_max=8,
            watchers=2,
            watchers_max=4,
            key_counts_bytes=5,
            key_counts_bytes_max=6,
            strangers={"rest_tcp": 3},
            turned_away={("rest_tcp", "stranger"): 5},
        )
    )

    assert value(metrics, "kvlease_connections", listener="local") == 7
    assert value(metrics, "kvlease_connections_max") == 8
    assert value(metrics, "kvlease_watchers") == 2
    assert value(metrics, "kvlease_watchers_max") == 4
    assert value(metrics, "kvlease_key_counts_bytes") == 5
    assert value(metrics, "kvlease_key_counts_bytes_max") == 6
    assert value(metrics, "kvlease_stranger_connections", listener="rest_tcp") == 3
    turned_away = value(
        metrics, "kvlease_connections_turned_away_total", listener="rest_tcp", who="stranger"
    )
    assert turned_away == 5


def test_limits_of_nameless_tenants_are_not_shown(metrics: Metrics) -> None:
    """A tenant without a name has no limits to show."""
    stranger = replace(
        SURVEYED, survey=replace(SURVEY, tenants=(replace(LIMITS, tenant_digest=1),))
    )
    metrics.watch_caches(lambda: [stranger])

    assert "kvlease_tenant_limit_blocks" not in metrics.render().decode()


def test_waste_is_shown_by_group(metrics: Metrics) -> None:
    """Missing tokens and padding are shown in bytes of a group's blocks, beside the plan's own waste."""
    assert value(metrics, "kvlease_group_blocks", cache="demo", group="0") == 3
    assert value(metrics, "kvlease_group_unfilled_bytes", cache="demo", group="0") == 1500
    assert value(metrics, "kvlease_group_padding_bytes", cache="demo", group="0") == 288
    labels = {"cache": "demo", "tier": "device", "cause": "null_blocks"}
    assert value(metrics, "kvlease_plan_waste_bytes", **labels) == 4096


def test_departures_are_shown(metrics: Metrics) -> None:
    """Evictions are shown by reason, with the blocks' time cached and idle, and how many are needed again."""
    labels = {"cache": "demo", "tier": "device"}

    assert value(metrics, "kvlease_evictions_total", **labels, reason="evicted") == 5
    assert value(metrics, "kvlease_evictions_total", **labels, reason="damaged") == 0
    assert value(metrics, "kvlease_block_residence_seconds_sum", **labels) == 200
    assert value(metrics, "kvlease_block_idle_seconds_bucket", **labels, le="3.0") == 5
    assert value(metrics, "kvlease_missed_blocks_total", cache="demo", reason="evicted") == 3
    assert value(metrics, "kvlease_missed_blocks_not_looked_up_total", cache="demo") == 11


def test_every_metric_of_the_catalogue_is_shown(metrics: Metrics) -> None:
    """Every metric in the catalogue exists, and every metric that exists is in the catalogue."""
    found = {family.name for family in text_string_to_metric_families(metrics.render().decode())}

    assert {name for name in found if name.startswith("kvlease_")} == {
        f"kvlease_{name}" for name in BY_NAME
    }


def test_kinds_have_their_endings() -> None:
    """The name of each kind of metric has the ending by which Prometheus asks for it."""
    endings = {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_bucket", Kind.GAUGE: ""}

    assert all(
        one.full_name == f"kvlease_{name}{endings[one.kind]}" for name, one in BY_NAME.items()
    )


def test_nothing_is_created(metrics: Metrics) -> None:
    """The `_created` series, which leak, are off."""
    assert "_created" not in metrics.render().decode()


def test_names_pass_the_lint_of_prometheus(metrics: Metrics) -> None:
    """Names, units and help texts pass the lint of Prometheus."""
    promtool = debian.program("promtool", ("prometheus",))
    lint = subprocess.run(
        [promtool, "check", "metrics"], input=metrics.render(), capture_output=True, check=False
    )

    assert (lint.returncode, lint.stdout + lint.stderr) == (0, b"")


async def test_others_have_their_turn_during_a_scrape(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop serves others between two pieces, and the text is the same as in one go."""
    monkeypatch.setattr("kvleased.metrics.TURN_SECONDS", 0.0)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    text = await metrics.scrape()
    counting.cancel()

    assert turns > len(BY_NAME)
    assert text.count(b"# TYPE kvlease_") == metrics.render().count(b"# TYPE kvlease_")
    assert value(metrics, "kvlease_scrape_seconds") > 0


def test_repr_shows_life(metrics: Metrics) -> None:
    """The repr shows how many calls were counted."""
    assert repr(metrics) == "<Metrics 5 calls>"
