"""Laws of what a tenant can learn from its calls: neither answer nor work tells whether another tenant has a prompt.

Work is counted and not timed: it is every line of the daemon's own that a call runs. `make bench ONLY=tenants` measures
the same by the clock.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import numpy as np

import kvleased
from kvlease.keys import BlockKeys
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from tests.unit.service.conftest import OPERATOR, TOKENS_PER_BLOCK, Node

OURS: Final = str(Path(kvleased.__file__).parent)
NUM_SAMPLES: Final = 120
"""About so many prompts of another tenant, and as many of nobody, in random order."""
NUM_WARM_UP: Final = 40
NUM_BLOCKS: Final = 3
NUM_TOKENS: Final = NUM_BLOCKS * TOKENS_PER_BLOCK
SHARE_MIN: Final = 0.8
"""Share of samples that take the usual work; in the rest a key collides with another in the table."""


class Seen(NamedTuple):
    """What a tenant is told, and the work that telling it took."""

    answers: tuple[str, ...]
    work: tuple[int, ...]
    """Lines run by each call."""


class Tenant(NamedTuple):
    """A worker, and the name of its tenant's keys."""

    caller: Caller
    naming: BlockKeys

    def keys(self, prompt: int) -> bytes:
        """Return the keys of a prompt."""
        tokens = np.arange(NUM_TOKENS, dtype=np.int32) + prompt * NUM_TOKENS
        return self.naming.chain(tokens, TOKENS_PER_BLOCK)


async def attached(node: Node, tenant: str) -> Tenant:
    """Attach a worker of a tenant."""
    caller = await node.attach(tenant=tenant)
    worker = node.daemon.registry.worker(caller.token)
    plan = worker.entry.plan
    return Tenant(caller, BlockKeys(worker.tenant_key, plan.layout_fingerprint, plan.model_digest))


def counted(act: Callable[[], Any]) -> tuple[Any, int]:
    """Do something; return its result and how many lines of the daemon's own code ran."""
    num_lines = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return act(), num_lines
    finally:
        sys.settrace(before)


def asked(node: Node, tenant: Tenant, prompt_keys: bytes, name: str) -> Seen:
    """Ask about a prompt in every way that its tenant may."""
    call = node.daemon.call
    caller = tenant.caller
    reserve = pb.ReserveRequest(request_id=name, keys=prompt_keys, num_tokens=NUM_TOKENS)
    looked, looking = counted(lambda: call("lookup", pb.LookupRequest(keys=prompt_keys), caller))
    lease, reserving = counted(lambda: call("reserve", reserve, caller))
    call("release", pb.ReleaseRequest(lease_id=lease.lease_id), caller)
    pinned, pinning = counted(lambda: call("pin", pb.PinRequest(keys=prompt_keys), caller))
    if pinned.pin_id:
        call("unpin", pb.UnpinRequest(pin_id=pinned.pin_id), caller)
    # Lease, block and row ids tell how many were granted before, whoever asks.
    for field in ("lease_id", "block_ids", "row"):
        lease.ClearField(field)
    pinned.ClearField("pin_id")
    answers = (str(looked), str(lease), str(pinned))
    return Seen(answers, (looking, reserving, pinning))


async def cached(node: Node, tenant: Tenant, prompt: int) -> None:
    """Have a tenant cache a prompt."""
    keys = tenant.keys(prompt)
    request = pb.ReserveRequest(request_id=f"p{prompt}", keys=keys, num_tokens=NUM_TOKENS)
    lease = await node.ask("reserve", request, tenant.caller)
    await node.ask(
        "commit",
        pb.CommitRequest(lease_id=lease.lease_id, num_tokens=NUM_TOKENS, keys=keys),
        tenant.caller,
    )
    await node.ask("release", pb.ReleaseRequest(lease_id=lease.lease_id), tenant.caller)


async def sampled(node: Node, holder: Tenant, curious: Tenant) -> tuple[list[Seen], list[Seen]]:
    """Return what a curious tenant sees of the holder's prompts, and of others that nobody has."""
    held: list[Seen] = []
    nobodys: list[Seen] = []
    coin = random.Random(0)  # noqa: S311 -- it is to be the same each time
    for number in range(2 * NUM_SAMPLES):
        await cached(node, holder, 2 * number)
        is_held = coin.random() < 0.5
        wanted = 2 * number + (not is_held)
        seen = asked(node, curious, curious.keys(wanted), f"q{number}")
        # The first samples meet code and state that nobody has used before.
        if number >= NUM_WARM_UP:
            (held if is_held else nobodys).append(seen)
        await node.ask("evict", pb.EvictRequest(num_blocks=NUM_BLOCKS), OPERATOR)
    return held, nobodys


def usual(samples: list[Seen], call: int) -> tuple[int, float]:
    """Return the work that a call usually takes, and the share of samples that take it."""
    ((work, count),) = Counter(sample.work[call] for sample in samples).most_common(1)
    return work, count / len(samples)


async def test_tenant_cannot_tell_what_another_has(node: Node) -> None:
    """Of a prompt that another tenant has and of one that nobody has, a tenant is told the same for the same work."""
    async with node.life():
        await node.register(device_blocks=64, host_bytes=0)
        holder, curious = await attached(node, "a"), await attached(node, "b")

        held, nobodys = await sampled(node, holder, curious)

    assert {sample.answers for sample in held} == {sample.answers for sample in nobodys}
    for call in range(3):
        (work, share), (other, other_share) = usual(held, call), usual(nobodys, call)
        assert work == other
        assert min(share, other_share) >= SHARE_MIN


async def test_count_of_work_would_tell_a_hit(node: Node) -> None:
    """The law above can fail: for a tenant's own prompts, answer and work do show a hit."""
    async with node.life():
        await node.register(device_blocks=64, host_bytes=0)
        holder = await attached(node, "a")

        held, nobodys = await sampled(node, holder, holder)

    assert held[0].answers != nobodys[0].answers
    assert all(usual(held, call)[0] != usual(nobodys, call)[0] for call in range(3))


async def test_stolen_key_is_answered_as_one_that_nobody_has(node: Node) -> None:
    """A tenant with another's stolen keys is answered as for keys that nobody has."""
    async with node.life():
        await node.register(device_blocks=64, host_bytes=0)
        holder, curious = await attached(node, "a"), await attached(node, "b")
        await cached(node, holder, 0)

        stolen = asked(node, curious, holder.keys(0), "stolen")
        nobodys = asked(node, curious, curious.keys(1), "nobodys")

    assert stolen.answers == nobodys.answers
