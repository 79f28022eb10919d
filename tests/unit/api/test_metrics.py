"""Laws of the metrics: what was counted is shown, states add up, and Prometheus' own lint has nothing to say."""

import shutil
import subprocess
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvleased.core.census import Census
from kvleased.metrics import BUCKETS, STATES, Metrics
from kvleased.movers.link import LinkFigures
from kvleased.verbs.figures import Figures

DEVICE = dict.fromkeys(STATES, 2) | {"ready_held": 1}
CENSUS = Census(
    device=DEVICE, host=dict.fromkeys(STATES, 0), num_leases=3, num_waiting=1, waiting_by_priority={1: 1},
    num_workers=2, num_pins=0, num_copies=0,
    magazines=((2, 5, 7),),
    counters={"evictions": 5, "prefix_tokens_device": 64, "prefix_tokens_host": 16, "blocks_forked": 4},
)  # fmt: skip
FIGURES = Figures(
    census=CENSUS,
    waiting={"low": 0, "normal": 0, "high": 1},
    tenants={("chat", "used"): 9, ("chat", "held"): 8, ("chat", "pinned"): 7},
    pools={"device": DEVICE, "disk": DEVICE},
    are_up={"host": True, "disk": False},
)
MOVER = LinkFigures(num_waiting=3, num_sent=2, oldest_seconds=0.5)


@pytest.fixture
def metrics() -> Metrics:
    """Metrics over one cache, with some calls and copies counted."""
    counted = Metrics()
    counted.epoch = 9
    counted.watch_caches(lambda: {"demo": FIGURES})
    counted.watch_movers(lambda: {"disk": MOVER})
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
    """Each magazine has its private blocks and those that it holds, by its place."""
    of_one = {"cache": "demo", "magazine": "2"}

    assert value(metrics, "kvlease_magazine_blocks", **of_one, state="private") == 5
    assert value(metrics, "kvlease_magazine_blocks", **of_one, state="held") == 7


def test_states_add_up_to_the_pool(metrics: Metrics) -> None:
    """Summing over states gives the capacity; what is held is not counted twice."""
    found = samples(metrics).items()
    device = [
        number for (name, labels), number in found
        if name == "kvlease_blocks" and ("tier", "device") in labels
    ]  # fmt: skip

    assert sum(device) == 2 * len(STATES)
    assert value(metrics, "kvlease_blocks_held", cache="demo", tier="device") == 1


def test_tiers_tell_whether_they_work(metrics: Metrics) -> None:
    """A tier that is off is told apart from one that a cache does not have."""
    found = samples(metrics)

    assert value(metrics, "kvlease_tier_up", cache="demo", tier="host") == 1
    assert value(metrics, "kvlease_tier_up", cache="demo", tier="disk") == 0
    assert ("kvlease_tier_up", frozenset({("cache", "demo"), ("tier", "remote")})) not in found
    assert value(metrics, "kvlease_blocks", cache="demo", tier="disk", state="ready") == 2


def test_queues_of_movers_are_shown(metrics: Metrics) -> None:
    """Batches are told by mover, those that it has apart from those that wait for it."""
    assert value(metrics, "kvlease_mover_queue", mover="disk", state="waiting") == 3
    assert value(metrics, "kvlease_mover_queue", mover="disk", state="sent") == 2
    assert value(metrics, "kvlease_mover_oldest_seconds", mover="disk") == 0.5


def test_calls_are_counted_by_code(metrics: Metrics) -> None:
    """Each answered call counts once, under its verb, transport and code."""
    name = "kvlease_requests_total"

    assert value(metrics, name, verb="reserve", transport="local", code="OK") == 4
    assert value(metrics, name, verb="reserve", transport="rest", code="POOL_FULL") == 1


def test_buckets_hold_what_is_not_slower(metrics: Metrics) -> None:
    """A call as slow as a bound is inside it; the last bucket holds all."""
    name, labels = "kvlease_request_seconds_bucket", {"verb": "reserve", "transport": "local"}

    assert value(metrics, name, le=str(BUCKETS[0]), **labels) == 2
    assert value(metrics, name, le=str(BUCKETS[1]), **labels) == 3
    assert value(metrics, name, le="+Inf", **labels) == 4
    assert value(metrics, "kvlease_request_seconds_count", **labels) == 4


def test_snapshot_is_shown(metrics: Metrics) -> None:
    """Gauges and counters of the core appear under the names that operators know."""
    assert value(metrics, "kvlease_leases", cache="demo") == 3
    assert value(metrics, "kvlease_waiting_requests", cache="demo", priority="high") == 1
    assert value(metrics, "kvlease_waiting_requests", cache="demo", priority="low") == 0
    assert value(metrics, "kvlease_workers", cache="demo") == 2
    assert value(metrics, "kvlease_evictions_total", cache="demo") == 5
    assert value(metrics, "kvlease_blocks_forked_total", cache="demo") == 4
    assert value(metrics, "kvlease_prefix_tokens_total", cache="demo", outcome="device_hit") == 64
    assert value(metrics, "kvlease_prefix_tokens_total", cache="demo", outcome="computed") == 0
    assert (
        value(metrics, "kvlease_copy_bytes_total", direction="device_to_host", result="ok") == 4096
    )
    assert value(metrics, "kvlease_epoch") == 9


def test_blocks_of_tenants_are_shown(metrics: Metrics) -> None:
    """A tenant's held and pinned blocks are told beside all that it uses."""
    name = "kvlease_tenant_blocks"

    assert value(metrics, name, cache="demo", tenant="chat", state="used") == 9
    assert value(metrics, name, cache="demo", tenant="chat", state="held") == 8
    assert value(metrics, name, cache="demo", tenant="chat", state="pinned") == 7


def test_nothing_is_created(metrics: Metrics) -> None:
    """The `_created` series, which leak, are off."""
    assert "_created" not in metrics.render().decode()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_names_pass_the_lint_of_prometheus(metrics: Metrics) -> None:
    """Names, units and help texts are as Prometheus wants them."""
    lint = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, check=False
    )

    assert (lint.returncode, lint.stdout + lint.stderr) == (0, b"")
