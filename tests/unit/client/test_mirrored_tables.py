"""Laws of what a client without a block table knows: after any steps and trims it is what the daemon has."""

import random

import pytest

from kvlease.groups import GroupShape
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.mirrored import Client
from tests.unit.service.core.builders import WORKER
from tests.unit.service.core.grouped import CHUNK, FULL, GUESSING, STATE, WINDOW, cache_of

_COMMIT, _EXTEND = pb.STEP_VERB_COMMIT, pb.STEP_VERB_EXTEND
_TOKENS_MAX = 56
MIXES = {
    "window": (WINDOW,),
    "chunk": (CHUNK,),
    "full and window": (FULL, WINDOW),
    "full and chunk": (FULL, CHUNK),
    "state": (STATE,),
    "guessing": (GUESSING,),
    "full and guessing": (FULL, GUESSING),
    "all": (FULL, WINDOW, STATE, GUESSING),
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("groups", MIXES.values(), ids=MIXES)
def test_tables_are_the_daemons_after_any_steps_and_trims(
    groups: tuple[GroupShape, ...], seed: int
) -> None:
    """A commit, an extend, both in one step in either order, and a trim leave client and daemon with one table."""
    rng = random.Random(seed)  # noqa: S311 - a seeded history
    client = Client(cache_of(*groups), WORKER, rng.randint(1, 12))
    done = 0
    for _ in range(25):
        done = min(client.grant.covered_tokens, done + rng.randint(0, 9))
        wanted = min(_TOKENS_MAX, max(1, done) + rng.randint(0, 20))
        match rng.randrange(5):
            case 0:
                client.trim(max(1, done) + rng.randint(0, 12))
            case 1:
                client.step((_EXTEND, wanted), (_COMMIT, done))
            case 2:
                client.step((_COMMIT, done))
            case 3:
                client.step((_EXTEND, wanted))
            case _:
                client.step((_COMMIT, done), (_EXTEND, wanted))

        assert client.grant.is_live
        assert client.tables == client.rows
