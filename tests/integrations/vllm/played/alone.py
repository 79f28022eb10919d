"""Own a played engine of one mode that is alone at its pool and hears every answer."""

import random
from typing import Any, NamedTuple

from kvlease.memory.mapped import Identity
from tests.integrations.vllm.models import path_of
from tests.integrations.vllm.played.copies import Copier
from tests.integrations.vllm.played.engine import Build, PlayedEngine
from tests.integrations.vllm.played.pool import PlayedPool
from tests.integrations.vllm.played.rank import Rank
from tests.integrations.vllm.played.session import PlayedSession, Weather
from tests.integrations.vllm.played.stamps import Memory, Rows


class Alone(NamedTuple):
    """An engine, and what it has to itself."""

    engine: PlayedEngine
    pool: PlayedPool
    memory: Memory
    rows: Rows
    """The rows that an engine in mode *offload* stores its blocks in."""


def alone(mode: str, num_blocks: int, chance: random.Random, **build: Any) -> Alone:
    """Start an engine whose steps do not overlap; `build` has what else it is started with."""
    is_offload = mode == "offload"
    pool, memory = PlayedPool(num_blocks), Memory(num_blocks)
    if mode == "owned":
        pool.claim("e0")
    built = Build(
        modes=(mode,),
        model=str(path_of("llama")),
        num_blocks=num_blocks,
        windows=(0,),
        is_async=False,
        requests_max=6,
        retention_interval=None,
        **build,
    )
    identity: Identity = (("tables" if is_offload else "device", 1, 1),)
    session = PlayedSession("e0", pool, identity, Weather(losses=0, outages=0), chance)
    rank, rows = Rank(memory, (0,)), Rows(identity, num_blocks)
    copier = Copier(rank, lambda: rows, has_one_group=True, device=None) if is_offload else None
    return Alone(PlayedEngine(built, [session], rank, copier, chance), pool, memory, rows)
