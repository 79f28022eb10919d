"""The law of prefix tokens: the counts of all outcomes add up to the tokens of all granted requests."""

from random import Random

import pytest

from kvlease.errors import KVLeaseError
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Direction, Outcome, Reserved, Wake
from tests.unit.service.core.builders import TOKENS_PER_BLOCK, WAIT_MS, WORKER, a_cache, keys

OUTCOMES = ("device", "host", "disk", "remote", "computed")


def land_all(cache: Cache, outcome: Outcome, granted: list[Reserved], random: Random) -> None:
    """Let all copies end, with one in eight of the reloads failing, and keep the leases of waiting callers."""
    effects = list(outcome.effects)
    while effects:
        effect = effects.pop(0)
        if isinstance(effect, Copy):
            is_bad = effect.direction is Direction.RELOAD and not random.randrange(8)
            kind = c.CopyFailed if is_bad else c.CopyDone
            effects += cache.handle(kind(copy_id=effect.copy_id), 0.0).effects
        elif isinstance(effect, Wake) and isinstance(effect.result, Reserved):
            granted.append(effect.result)


@pytest.mark.parametrize("seed", range(5))
def test_outcomes_add_up_to_the_requests(seed: int) -> None:
    """Each token of each grant counts once, wherever it is found, waited for or lost on its way."""
    random = Random(seed)  # noqa: S311 - no secret
    cache = a_cache(24, 24, max_leases=4)
    num_tokens, granted = 0, []
    for number in range(300):
        length = random.randint(1, 8)
        prompt = keys(*(100 * random.randint(0, 5) + at + 1 for at in range(length)))
        asked = length * TOKENS_PER_BLOCK + random.randint(0, 3)
        granted.clear()
        command = c.Reserve(
            worker_id=WORKER, request_id=str(number), keys=prompt, num_tokens=asked,
            wait_ms=WAIT_MS * random.randint(0, 1),
        )  # fmt: skip
        try:
            outcome = cache.handle(command, 0.0)
        except KVLeaseError:
            continue
        if isinstance(outcome.reply, Reserved):
            granted.append(outcome.reply)
        land_all(cache, outcome, granted, random)
        (lease,) = granted
        num_tokens += asked
        for act in (
            c.Commit(worker_id=WORKER, lease_id=lease.lease_id, num_tokens=length * TOKENS_PER_BLOCK,
                     first_block=0, keys=prompt),
            c.Release(worker_id=WORKER, lease_id=lease.lease_id),
            c.Evict(num_blocks=random.randint(1, 4)),
        ):  # fmt: skip
            land_all(cache, cache.handle(act, 0.0), granted, random)

    counters = cache.census().counters
    found = {name: counters.get(f"prefix_tokens_{name}", 0) for name in OUTCOMES}

    assert sum(found.values()) == num_tokens
    assert found["device"] > 0
    assert found["host"] > 0
    assert found["computed"] > 0
