"""A request that is alone in a pool planned for it is served to its end, however it grows."""

from collections.abc import Iterator
from random import Random
from typing import Final

import pytest

from kvlease.groups import most_blocks
from kvlease.ids import LeaseId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.checks.sound import Sound
from kvleased.core.effects import Extended, Stepped
from kvleased.core.verbs.stepping import StepVerb
from tests.laws.shapes import LONGEST_TOKENS, MIXES
from tests.unit.service.core.builders import WORKER, answer
from tests.unit.service.core.grouped import (
    cache_of,
    chain,
    commit_tokens,
    counts,
    map_lease,
    reserve_tokens,
)

_ADDED_TOKENS_MAX: Final = 24
_WALKS: Final = 24
"""Ways to grow that are tried for each cache."""


@pytest.mark.parametrize("seed", range(_WALKS))
@pytest.mark.parametrize("name", MIXES)
def test_request_that_is_alone_is_never_refused(name: str, seed: int) -> None:
    """As long as it commits what it has computed, a pool of exactly its most blocks is enough at every token."""
    groups, rng = MIXES[name].groups, Random(f"{name} {seed}")  # noqa: S311 - not for secrets
    most = sum(most_blocks(group, LONGEST_TOKENS) for group in groups)
    cache = cache_of(*groups, num_blocks=1 + most, longest_request_tokens=LONGEST_TOKENS)
    lease = reserve_tokens(cache, rng.randint(1, LONGEST_TOKENS))
    covered, sound = lease.covered_tokens, Sound()
    if rng.random() < 1 / 2:
        map_lease(cache, lease.lease_id)

    for num_tokens in _growth(rng):
        while covered < num_tokens:
            commit_tokens(cache, lease.lease_id, covered, chain(covered - covered % 4))
            covered = _extended(cache, rng, lease.lease_id, num_tokens)
            assert cache.check(sound) == []

    assert covered == LONGEST_TOKENS


def _growth(rng: Random) -> Iterator[int]:
    """Yield rising numbers of tokens, up to the longest request."""
    num_tokens = 0
    while num_tokens < LONGEST_TOKENS:
        num_tokens = min(LONGEST_TOKENS, num_tokens + rng.randint(1, _ADDED_TOKENS_MAX))
        yield num_tokens


def _extended(cache: Cache, rng: Random, lease_id: LeaseId, num_tokens: int) -> int:
    """Let a lease cover more tokens, by a call or in a step; return how many it covers."""
    if rng.random() < 1 / 2:
        step = c.Step(
            worker_id=WORKER,
            verbs=bytes([StepVerb.EXTEND]),
            lease_ids=lease_id.to_bytes(8, "little"),
            num_tokens=num_tokens.to_bytes(4, "little"),
        )
        assert counts(answer(cache.handle(step, 0.0), Stepped).codes) == [0]
    command = c.Extend(worker_id=WORKER, lease_id=lease_id, num_tokens=num_tokens)
    return answer(cache.handle(command, 0.0), Extended).covered_tokens
