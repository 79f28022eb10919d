"""One scenario through the local socket, REST and gRPC against one real daemon: replies and errors are the same."""

import http.client
import itertools
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from kvlease import Client
from kvlease.transports.base import Address, Outgoing, parse_address
from kvlease.v1 import kvlease_pb2 as pb
from tests.acceptance.scenario import SOCKETS, Comparable, Run, keys, packed, serving

pytestmark = pytest.mark.acceptance

CACHE = "parity"
LAYER = pb.LayerSpec(name="0", kind="full_attention", num_kv_heads=1, head_size=16, dtype="float32")
INPUTS = pb.PlanInputs(layers=[LAYER], tokens_per_block=4, device_blocks=16, host_bytes=8 * 512)
OTHER_INPUTS = pb.PlanInputs(layers=[LAYER], tokens_per_block=8, device_blocks=16)
HYBRID_INPUTS = pb.PlanInputs(
    layers=[
        pb.LayerSpec(
            name="0", kind="full_attention", num_kv_heads=2, head_size=64, dtype="float16"
        ),
        pb.LayerSpec(
            name="1", kind="sliding_window", num_kv_heads=2, head_size=64, dtype="float16",
            window_tokens=64,
        ),
        pb.LayerSpec(
            name="2", kind="state_space", shapes=[pb.Shape(extents=[4, 16])], dtypes=["float32"]
        ),
    ],
    tokens_per_block=16,
    device_blocks=64,
    host_bytes=1 << 22,
    null_blocks=1,
    layout="LBHNC",
    engine=pb.EngineInputs(prefix_caching=False, lookahead_tokens=4),
    parallel=pb.ParallelInputs(tensor_ranks=2),
    ranks=[pb.RankInputs(device_bytes=1 << 26), pb.RankInputs()],
    backends=[pb.BackendInputs(name="mine", exact_tokens=[16], multiples_tokens=[32])],
)  # fmt: skip


def register(run: Run) -> None:
    """Plan and register a cache, with every mistake that can be made."""
    run.call("plan", pb.PlanRequest(inputs=INPUTS))
    run.call("plan", pb.PlanRequest(inputs=HYBRID_INPUTS))
    run.call("plan", pb.PlanRequest())
    unknown_field = pb.LayerSpec(
        name="0", kind="mla", head_size=64, dtype="float16", chunk_tokens=4
    )
    for layer in (pb.LayerSpec(name="0", kind="imaginary"), unknown_field):
        inputs = pb.PlanInputs(layers=[layer], tokens_per_block=16, device_blocks=4)
        run.call("plan", pb.PlanRequest(inputs=inputs))
    run.call(
        "plan",
        pb.PlanRequest(inputs=pb.PlanInputs(layers=[LAYER], tokens_per_block=4, device_bytes=64)),
    )
    run.call("plan", pb.PlanRequest(inputs=pb.PlanInputs(model_config="{", tokens_per_block=4)))
    run.call("register_cache", pb.RegisterCacheRequest(cache="Not A Name", inputs=INPUTS))
    run.call("register_cache", pb.RegisterCacheRequest(cache=CACHE, inputs=INPUTS))
    run.said.pop()  # whether it is populated already is chance
    get = Outgoing("get_cache", pb.GetCacheRequest(cache=CACHE), time.monotonic() + 10)
    while run.transport.send(get).info.status != "ready":  # type: ignore[attr-defined]  # a GetCacheResponse
        time.sleep(0.01)
    run.call("register_cache", pb.RegisterCacheRequest(cache=CACHE, inputs=INPUTS))
    run.call("register_cache", pb.RegisterCacheRequest(cache=CACHE, inputs=OTHER_INPUTS))
    run.call("get_cache", pb.GetCacheRequest(cache=CACHE))
    run.call("get_cache", pb.GetCacheRequest(cache="unknown"))
    run.call("list_caches", pb.ListCachesRequest())


def attach(run: Run) -> tuple[str, str]:
    """Attach two workers; returns their tokens."""
    run.call("attach", pb.AttachRequest(cache="unknown"))
    run.call("attach", pb.AttachRequest(cache=CACHE, layout_fingerprint="00"))
    run.call("attach", pb.AttachRequest(cache=CACHE, lease_ids=packed(1)))
    run.call("attach", pb.AttachRequest(cache=CACHE, rank=1))
    run.call("attach", pb.AttachRequest(cache=CACHE, resume_token="nobody's"))
    request = pb.AttachRequest(cache=CACHE, worker_name="w", tenant="t")
    first, second = run.call("attach", request), run.call("attach", request)
    for _, told in run.said[-2:]:
        # Memory and proofs of death are handed over by the local socket alone; tokens are random.
        for name in ("regions", "death_proof", "token"):
            told.pop(name)
    for token in ("", first.token):
        run.call("get_cache", pb.GetCacheRequest(), token=token)
        run.call("inspect", pb.InspectRequest(what="pins"), token=token)
    return first.token, second.token


def grant(run: Run, token: str, other: str) -> int:
    """Reserve, map, extend and commit, with every refusal on the way; returns the lease."""
    reserve = pb.ReserveRequest(request_id="r1", keys=keys(1, 4), num_tokens=16)
    lease_id: int = run.call("reserve", reserve, token=token).lease_id
    run.call("reserve", reserve, token=token)
    run.call("reserve", pb.ReserveRequest(request_id="r1", num_tokens=12), token=token)
    run.call("reserve", reserve)
    run.call("reserve", reserve, token="wrong")
    run.call("reserve", reserve, token=token, epoch=1)
    run.call("reserve", pb.ReserveRequest(num_tokens=4), token=token)
    run.call("reserve", pb.ReserveRequest(request_id="r2"), token=token)
    run.call("reserve", pb.ReserveRequest(request_id="r2", num_tokens=4, keys=b"x"), token=token)
    run.call("reserve", pb.ReserveRequest(request_id="r2", num_tokens=10_000), token=token)
    run.call("reserve", pb.ReserveRequest(request_id="r2", num_tokens=2**32 - 1), token=token)
    run.call("reserve", pb.ReserveRequest(request_id="r2", num_tokens=52), token=token)
    urgent = pb.ReserveRequest(request_id="r2", num_tokens=4, priority="urgent")
    run.call("reserve", urgent, token=token)
    for_ever = pb.ReserveRequest(request_id="r2", num_tokens=4, retain_seconds=2**31)
    run.call("reserve", for_ever, token=token)
    retain(run, token)
    run.call("reserve", pb.ReserveRequest(request_id="r2", num_tokens=52, wait_ms=20), token=token)
    _, told = run.said[-1]
    # The final duration depends on the machine.
    told["message"] = re.sub(r"^after \d+\.\d s: ", "after a while: ", told["message"])
    tokens = packed(*range(8), code="i")
    run.call(
        "reserve", pb.ReserveRequest(request_id="r3", num_tokens=8, token_ids=tokens), token=other
    )
    negative = pb.ReserveRequest(
        request_id="r4", num_tokens=8, token_ids=packed(5, 6, -3, code="i")
    )
    run.call("reserve", negative, token=other)
    twice = pb.ReserveRequest(request_id="r4", num_tokens=12, keys=keys(1, 2) + keys(1, 1))
    run.call("reserve", twice, token=other)
    for number in (lease_id, -1, 2**45):
        run.call("map", pb.MapRequest(lease_id=number), token=token)
    run.call("map", pb.MapRequest(lease_id=lease_id), token=other)
    run.call("extend", pb.ExtendRequest(lease_id=lease_id, num_tokens=20), token=token)
    run.call("extend", pb.ExtendRequest(lease_id=lease_id, num_tokens=60), token=token)
    run.call("extend", pb.ExtendRequest(lease_id=lease_id), token=token)
    run.call(
        "commit", pb.CommitRequest(lease_id=lease_id, num_tokens=16, keys=keys(1, 4)), token=token
    )
    run.call(
        "commit", pb.CommitRequest(lease_id=lease_id, num_tokens=16, keys=keys(1, 9)), token=token
    )
    return lease_id


def retain(run: Run, token: str) -> None:
    """Reserve with a retain priority, alone and in a step, and with an invalid one."""
    for number in (0, 70, 101):
        numbered = pb.ReserveRequest(request_id="n", num_tokens=4, retain_priority=number)
        lease_id = run.call("reserve", numbered, token=token).lease_id
        run.call("step", pb.StepRequest(reserves=[numbered]), token=token)
        other = pb.ReserveRequest(request_id="n", num_tokens=4, retain_priority=50)
        if lease_id:
            run.call("reserve", other, token=token)
            run.call("release", pb.ReleaseRequest(lease_id=lease_id), token=token)


def fork(run: Run, token: str, other: str, lease_id: int) -> None:
    """Fork and trim, with every refusal on the way; the lease is then as it was."""
    request = pb.ForkRequest(lease_id=lease_id, request_id="f1", num_tokens=24)
    child = run.call("fork", request, token=token).lease.lease_id
    run.call("fork", request, token=other)
    run.call("fork", request)
    run.call("fork", pb.ForkRequest(lease_id=2**45, request_id="f2", num_tokens=24), token=token)
    run.call("fork", pb.ForkRequest(lease_id=lease_id, request_id="f2"), token=token)
    run.call("trim", pb.TrimRequest(lease_id=child, num_tokens=20), token=token)
    run.call("trim", pb.TrimRequest(lease_id=child, num_tokens=20), token=other)
    run.call("trim", pb.TrimRequest(lease_id=child), token=token)
    run.call("trim", pb.TrimRequest(lease_id=child, num_tokens=4), token=token)
    run.call("release", pb.ReleaseRequest(lease_id=child), token=token)
    run.call("trim", pb.TrimRequest(lease_id=lease_id, num_tokens=16), token=token)
    run.call("extend", pb.ExtendRequest(lease_id=lease_id, num_tokens=20), token=token)


def move(run: Run, token: str, lease_id: int) -> None:
    """Look up, pin, evict and reload."""
    run.call("lookup", pb.LookupRequest(keys=keys(1, 6)))
    run.call("lookup", pb.LookupRequest(keys=keys(1, 6)), cache="unknown")
    pin_id = run.call("pin", pb.PinRequest(keys=keys(1, 2)), cache=CACHE).pin_id
    run.call("unpin", pb.UnpinRequest(pin_id=pin_id))
    run.call("unpin", pb.UnpinRequest(pin_id=pin_id))
    run.call("unpin", pb.UnpinRequest(pin_id=-1))
    none = run.call("pin", pb.PinRequest(keys=keys(90, 2)), cache=CACHE)
    assert run.call("unpin", pb.UnpinRequest(pin_id=none.pin_id)) == pb.UnpinResponse()
    run.call("evict", pb.EvictRequest())
    run.call("evict", pb.EvictRequest(keys=keys(1, 1), num_blocks=1))
    run.call("evict", pb.EvictRequest(lease_id=lease_id))
    run.call("evict", pb.EvictRequest(lease_id=lease_id), token=token)
    run.call("evict", pb.EvictRequest(lease_id=lease_id), token=token)
    run.call("extend", pb.ExtendRequest(lease_id=lease_id, num_tokens=24), token=token)
    run.call("reload", pb.ReloadRequest(lease_id=lease_id), token=token)
    run.call("reload", pb.ReloadRequest(lease_id=lease_id), token=token)
    run.call("reload", pb.ReloadRequest())
    run.call("release", pb.ReleaseRequest(lease_id=lease_id), token=token)
    run.call("release", pb.ReleaseRequest(lease_id=lease_id), token=token)
    run.call("evict", pb.EvictRequest(keys=keys(3, 2)))
    run.call("evict", pb.EvictRequest(num_blocks=1))
    run.call("lookup", pb.LookupRequest(keys=keys(1, 4)))
    run.call("reload", pb.ReloadRequest(keys=keys(1, 4)))
    run.call("lookup", pb.LookupRequest(keys=keys(1, 4)))


def step(run: Run, token: str) -> None:
    """Step with columns, and call with heartbeats and idempotency keys."""
    reserve = pb.ReserveRequest(request_id="s1", keys=keys(1, 4), num_tokens=16)
    granted = run.call("reserve", reserve, token=token, idempotency_key="once")
    run.call("reserve", reserve, token=token, idempotency_key="once")
    run.call(
        "reserve",
        pb.ReserveRequest(request_id="s9", num_tokens=4),
        token=token,
        idempotency_key="once",
    )
    columns = pb.StepRequest(
        verbs=b"\1\3\3",
        lease_ids=packed(granted.lease_id, granted.lease_id, 2**45),
        num_tokens=packed(20, 0, 0, code="i"),
        reserves=[
            pb.ReserveRequest(request_id="s2", num_tokens=8),
            pb.ReserveRequest(request_id="s3", num_tokens=10_000),
        ],
    )
    run.call("step", columns, token=token)
    run.call("step", pb.StepRequest(verbs=b"\1\3", lease_ids=packed(1)), token=token)
    run.call(
        "step",
        pb.StepRequest(verbs=b"\x09", lease_ids=packed(1), num_tokens=packed(0, code="i")),
        token=token,
    )
    run.call(
        "heartbeat", pb.HeartbeatRequest(lease_ids=packed(5), newest_lease_id=2**45), token=token
    )
    run.call("heartbeat", pb.HeartbeatRequest(newest_lease_id=-1), token=token)


def inspect(run: Run) -> None:
    """List workers, leases and pins page by page, and also waiting calls and tenants' blocks."""
    pin_id = run.call("pin", pb.PinRequest(keys=keys(1, 2)), cache=CACHE).pin_id
    for what in ("workers", "leases", "pins"):
        page = run.call("inspect", pb.InspectRequest(cache=CACHE, what=what, limit=1))
        (first,) = getattr(page, what)
        after_id = getattr(first, what.removesuffix("s") + "_id")
        run.call("inspect", pb.InspectRequest(cache=CACHE, what=what, after_id=after_id))
        for _, told in run.said[-2:]:
            # Times differ from run to run, and only the local socket proves a death.
            for entry in told[what]:
                for name in ("age_ms", "left_ms", "death_proof"):
                    entry.pop(name, None)
        run.call("inspect", pb.InspectRequest(cache="unknown", what=what))
        run.call("inspect", pb.InspectRequest(cache=CACHE, what=what, limit=10_000))
    run.call("unpin", pb.UnpinRequest(pin_id=pin_id))
    for what in ("waiting", "tenants", "magazines"):
        run.call("inspect", pb.InspectRequest(cache=CACHE, what=what))


_SPANS: Final = re.compile(r"(under )?[0-9.]+ (s|min)( to (under )?[0-9.]+ (s|min))?\b")


def explain(run: Run, token: str, other: str) -> None:
    """Reserve with an explanation, also in a step, and explain leases to callers who may and may not ask."""
    run.call("evict", pb.EvictRequest(num_blocks=1), cache=CACHE)
    asked = pb.ReserveRequest(request_id="e1", num_tokens=22, keys=keys(1, 5), explain=True)
    lease_id = run.call("reserve", asked, token=token).lease_id
    in_step = pb.ReserveRequest(request_id="e2", num_tokens=3, explain=True)
    run.call("step", pb.StepRequest(reserves=[in_step]), token=token)
    for caller in (token, other, "", "wrong"):
        run.call("explain", pb.ExplainRequest(lease_id=lease_id), token=caller)
    for number in (-1, 2**45):
        run.call("explain", pb.ExplainRequest(lease_id=number, cache=CACHE))
    run.call("explain", pb.ExplainRequest(lease_id=lease_id, cache="unknown"))
    for _, told in run.said:
        # Times differ from run to run.
        for reply in (told, *(one.get("granted", {}) for one in told.get("reserves", ()))):
            for miss in reply.get("misses", ()):
                miss.pop("age_ms", None)
                miss["why"] = _SPANS.sub("t", miss["why"])
    run.call("release", pb.ReleaseRequest(lease_id=lease_id), token=token)


def exchange(run: Run, runtime_dir: Path, plain: str) -> None:
    """Fill and empty a magazine, with every mistake; the processes that share one must have attached locally."""
    run.call("exchange", pb.ExchangeRequest(sequence=1), token=plain)
    run.call("inventory", pb.InventoryRequest(), token=plain)
    run.call("attach", pb.AttachRequest(cache=CACHE, magazine=129 * "m"))
    with (
        Client(f"unix://{runtime_dir}/kvlease.sock") as client,
        client.attach(CACHE, tenant="t", magazine=f"of {run.transport!r}") as worker,
    ):
        token = worker._session.link.token
        taken = run.call("exchange", pb.ExchangeRequest(sequence=1, take_new=2), token=token)
        blocks = taken.taken_blocks
        for sequence in (1, 5):
            run.call("exchange", pb.ExchangeRequest(sequence=sequence), token=token)
        torn = pb.ExchangeRequest(sequence=2, publish_blocks=blocks, publish_keys=keys(70, 1))
        run.call("exchange", torn, token=token)
        whole = pb.ExchangeRequest(
            sequence=2,
            publish_blocks=blocks,
            publish_keys=keys(70, 2),
            publish_positions=packed(0, 1, code="I"),
            hold_keys=keys(70, 3),
            take_running=1,
        )
        run.call("exchange", whole, token=token)
        run.call("inventory", pb.InventoryRequest(), token=token)
        drop = pb.ExchangeRequest(sequence=3, retract_blocks=blocks[:4], drop_blocks=blocks)
        run.call("exchange", drop, token=token)


def operate(run: Run, token: str) -> None:
    """Drain, clear, resize and limit, with every mistake that can be made."""
    reserve = pb.ReserveRequest(request_id="late", num_tokens=4)
    run.call("drain", pb.DrainRequest(cache=CACHE))
    run.call("drain", pb.DrainRequest(cache="unknown"))
    run.call("drain", pb.DrainRequest(), token=token)
    run.call("reserve", reserve, token=token)
    run.call("undrain", pb.UndrainRequest(cache=CACHE))
    run.call("drain", pb.DrainRequest())
    run.call("attach", pb.AttachRequest(cache=CACHE))
    run.call("register_cache", pb.RegisterCacheRequest(cache="other", inputs=INPUTS))
    run.call("undrain", pb.UndrainRequest())
    for request in (
        pb.ClearRequest(cache=CACHE, tenant="nobody"),
        pb.ClearRequest(cache=CACHE),
        pb.ClearRequest(cache="unknown"),
    ):
        told = run.call("clear", request)
        assert len(told.lease_ids) % 8 == 0
        for name in ("lease_ids", "pin_ids"):
            run.said[-1][1].pop(name, None)
    for tier, num_blocks in (
        ("device", 12),
        ("device", 17),
        ("device", 16),
        ("host", 2),
        ("host", 8),
        ("disk", 1),
    ):
        run.call("resize", pb.ResizeRequest(cache=CACHE, tier=tier, num_blocks=num_blocks))
    # So long a number replaces whatever revision was issued.
    tenant = str(time.time_ns())
    limits = pb.TenantLimits(max_percent=50, min_bytes=512, leases_max=3)
    run.call("get_tenant", pb.GetTenantRequest(tenant=tenant))
    for wrong_name in ("", 129 * "t"):
        run.call("get_tenant", pb.GetTenantRequest(tenant=wrong_name))
    for revision, wanted in ((4, limits), (4, limits), (3, limits), (4, pb.TenantLimits())):
        run.call("set_tenant", pb.SetTenantRequest(tenant=tenant, limits=wanted, revision=revision))
    run.call("inspect", pb.InspectRequest(cache=CACHE, what="tenants"))
    run.said.pop()  # tenants are listed by digest, in chance order
    for wrong in (
        pb.TenantLimits(min_percent=101),
        pb.TenantLimits(weight=-1.0),
        pb.TenantLimits(min_bytes=1 << 40),
        pb.TenantLimits(min_percent=60, max_percent=50),
    ):
        run.call("set_tenant", pb.SetTenantRequest(tenant=tenant, limits=wrong, revision=5))
    run.call("set_tenant", pb.SetTenantRequest(tenant=tenant, revision=5))


def err_twice(run: Run, token: str) -> None:
    """Make calls that are wrong in several ways at once, and some with values that are far too large."""
    long = "x" * 300
    for request in (pb.ReserveRequest(request_id=long), pb.EvictRequest(keys=b"x")):
        verb = type(request).__name__.removesuffix("Request").lower()
        for who, epoch, key in itertools.product((token, "wrong", ""), (0, 1, -1), ("", long)):
            run.call(verb, request, token=who, epoch=epoch, idempotency_key=key)
    for priority in ("urgent", long):
        reserve = pb.ReserveRequest(request_id="r", num_tokens=4, priority=priority)
        run.call("reserve", reserve, token=token)
    for name, value in (("host_bytes", 2**53), ("device_blocks", 2**53), ("layout", long)):
        inputs = pb.PlanInputs(layers=[LAYER], tokens_per_block=4, device_blocks=16)
        setattr(inputs, name, value)
        run.call("plan", pb.PlanRequest(inputs=inputs))
    options = pb.CacheOptions(integrity=long)
    request = pb.RegisterCacheRequest(cache="other", inputs=INPUTS, options=options)
    run.call("register_cache", request)
    run.call("attach", pb.AttachRequest(cache=CACHE, engine=long))
    for name in ("nowhere", CACHE):
        run.call("lookup", pb.LookupRequest(keys=keys(0, 1)), token=token, cache=name)
    for who, worker_id in itertools.product((token, "wrong"), (99, -1)):
        run.call("detach", pb.DetachRequest(worker_id=worker_id), token=who)


def end(run: Run, token: str, other: str) -> None:
    """Take stock, detach and delete."""
    run.call("stats", pb.StatsRequest(cache=CACHE))
    run.call("stats", pb.StatsRequest(cache="unknown"))
    run.call("delete_cache", pb.DeleteCacheRequest(cache=CACHE))
    run.call("detach", pb.DetachRequest(), token=token)
    run.call("detach", pb.DetachRequest(), token=token)
    run.call("detach", pb.DetachRequest(), token=other)
    run.call("delete_cache", pb.DeleteCacheRequest(cache=CACHE))
    run.call("stats", pb.StatsRequest())


@pytest.fixture(scope="module")
def runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run a daemon, and give its directory."""
    with serving(tmp_path_factory.mktemp("parity")) as directory:
        yield directory


def play(
    address: Address, runtime_dir: Path
) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, int]]]:
    """Play the whole scenario; return all replies and events."""
    with Run(address, CACHE) as run:
        register(run)
        token, other = attach(run)
        lease_id = grant(run, token, other)
        fork(run, token, other, lease_id)
        move(run, token, lease_id)
        step(run, token)
        inspect(run)
        explain(run, token, other)
        exchange(run, runtime_dir, token)
        operate(run, token)
        err_twice(run, token)
        end(run, token, other)
        for _, told in run.said:
            if told.get("tenants"):
                # Tenants whose limits an earlier play has set stay listed for ever.
                told["tenants"] = [one for one in told["tenants"] if one["tenant"] == "t"]
                told.pop("num_total")
            for cache in told.get("caches", ()):
                for name in [one for one in cache.get("counters", ()) if one.startswith("missed_")]:
                    del cache["counters"][name]  # looked up at the next tick
        return run.said, run.events()


@pytest.fixture(scope="module")
def plays(runtime_dir: Path) -> dict[str, Any]:
    """Play the scenario over each transport in turn; return replies and events."""
    played: dict[str, Any] = {}
    num_seen = 0
    for scheme, name in SOCKETS.items():
        said, events = play(parse_address(f"{scheme}://{runtime_dir}/{name}"), runtime_dir)
        played[scheme] = Comparable().of(said), events[num_seen:]
        num_seen = len(events)
    return played


@pytest.mark.parametrize("scheme", ["http+unix", "grpc+unix"])
def test_transports_say_the_same(plays: dict[str, Any], scheme: str) -> None:
    """Every reply and every error has the same fields with the same values, whatever way it came."""
    for reference, other in zip(plays["unix"][0], plays[scheme][0], strict=True):
        assert other == reference


@pytest.mark.parametrize("scheme", ["http+unix", "grpc+unix"])
def test_transports_do_the_same(plays: dict[str, Any], scheme: str) -> None:
    """The same calls lead to the same events."""
    assert plays[scheme][1] == plays["unix"][1]


def test_scenario_meets_every_verb_and_refusal(plays: dict[str, Any]) -> None:
    """The scenario is complete: every verb succeeds in it, and every refusal that calls can meet occurs."""
    said = plays["unix"][0]
    verbs = {field.name for field in pb.Call.DESCRIPTOR.oneofs_by_name["request"].fields}
    codes = {told["code"] for _, told in said if "code" in told}

    assert {verb for verb, told in said if "code" not in told} == verbs - {"watch", "trace"}
    assert codes >= {
        "INVALID", "NEVER_FITS", "POOL_FULL", "STALE_EPOCH", "UNKNOWN_LEASE", "UNKNOWN_WORKER", "UNKNOWN_CACHE",
        "ID_REUSED", "LAYOUT_MISMATCH", "NOT_YOURS", "WRONG_STATE", "CACHE_IN_USE",
        "DRAINING", "STALE_REVISION",
    }  # fmt: skip
    assert {kind for kind, _ in plays["unix"][1]} >= {
        "lease_granted", "lease_forked", "lease_trimmed", "blocks_committed", "lease_evicted", "lease_reloaded",
    }  # fmt: skip


@pytest.mark.parametrize("scheme", [*SOCKETS])
def test_prefix_that_is_none_is_refused_over_each_transport(
    plays: dict[str, Any], scheme: str
) -> None:
    """A prefix with a negative token id or a repeated key is refused, and the refusal says which it is."""
    told = {said.get("rule"): said["message"] for _, said in plays[scheme][0] if "code" in said}

    assert told["negative_token"] == "token_ids[2] is -3; a token id must be from 0 to 2147483647"
    assert told["repeated_key"] == (
        "keys names a block twice: key 2 is the same as key 0; all keys of a chain must differ"
    )


@pytest.fixture(scope="module")
def cache(plays: object, runtime_dir: Path) -> Iterator[Run]:  # noqa: ARG001 - the scenario comes first
    """Give a local run with a cache and one lease."""
    with Run(parse_address(f"unix://{runtime_dir}/kvlease.sock"), CACHE) as run:
        register(run)
        token, _ = attach(run)
        run.call("reserve", pb.ReserveRequest(request_id="r", num_tokens=16), token=token)
        yield run


def census(run: Run) -> str:
    """Return everything that stats tells."""
    stats = Outgoing("stats", pb.StatsRequest(), time.monotonic() + 10)
    return str(run.transport.send(stats))


def call_of(evict: bytes) -> bytes:
    """Return the bytes of a local call that carries this evict request."""
    return b"\x08\1\xba\1" + bytes([len(evict)]) + evict


def over_local(runtime_dir: Path, body: bytes) -> str:
    """Send the bytes of a call; returns the code of its refusal."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(runtime_dir / "kvlease.sock"))
        sock.sendall(len(body).to_bytes(4, "little") + body[:4096])
        return pb.Reply.FromString(sock.recv(65536)[4:]).error.code


def over_rest(runtime_dir: Path, body: bytes) -> str:
    """Send the bytes of a request to evict; returns the code of its refusal."""
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(runtime_dir / "http.sock"))
    connection.request("POST", "/v1/evict", body, {"Content-Type": "application/json"})
    answer = connection.getresponse().read().decode()
    connection.close()
    return answer.partition('"code":"')[2].partition('"')[0]


def over_grpc(runtime_dir: Path, body: bytes) -> str:
    """Send the bytes of a request to evict; returns the code of its refusal."""
    with grpc.insecure_channel(f"unix:{runtime_dir}/grpc.sock") as channel:
        call = channel.unary_unary("/kvlease.v1.KVLeaseService/Evict")
        with pytest.raises(grpc.RpcError) as caught:
            call(body, timeout=10)
    details = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    return re.search(rb"[A-Z_]{4,}", details.split(b"ErrorInfo")[1])[0].decode()  # type: ignore[index]  # it is there


EVICT = pb.EvictRequest(num_blocks=1).SerializeToString()
MINUS_ONE = b"\x18" + b"\xff" * 9 + b"\x01"
LARGE = 2 * 2**20
BAD = {
    "unknown field": (call_of(EVICT + b"\x78\1"), b'{"num_blocks":1,"surprise":1}', EVICT + b"\x78\1"),
    "wrong type": (call_of(b"\x1a\1a"), b'{"num_blocks":"1"}', b"\x1a\1a"),
    "negative count": (call_of(MINUS_ONE), b'{"num_blocks":-1}', MINUS_ONE),
    "no message": (b"\xff\xff\xff", b"\xff\xff", b"\xff\xff"),
    "oversized": (b"\0" * LARGE, b" " * LARGE, b"\x0a\x80\x80\x60" + b"x" * (3 * 2**19)),
}  # fmt: skip
"""The same mistakes in an evict, as the bytes of a local call, of a JSON body and of a gRPC message."""
SENDERS = {"local": (over_local, 0), "rest": (over_rest, 1), "grpc": (over_grpc, 2)}


@pytest.mark.parametrize(
    ("bad", "sender"),
    [pytest.param(*pair, id=f"{pair[0]}, {pair[1]}") for pair in itertools.product(BAD, SENDERS)],
)
def test_bad_input_is_refused_and_changes_nothing(
    runtime_dir: Path, cache: Run, bad: str, sender: str
) -> None:
    """The refusal of any bad input says what is wrong, and the stats stay as they were."""
    send, column = SENDERS[sender]
    before = census(cache)

    code = send(runtime_dir, BAD[bad][column])

    assert code == ("TOO_LARGE" if bad == "oversized" else "INVALID")
    assert census(cache) == before
