"""Own the law that a request which ends by an error amid its prompt leaves no block that is filled in part.

Run with the reference engine's Python and a mode.
"""

import logging
import random
import sys
from typing import Final

from kvlease.memory.mapped import Identity
from tests.integrations.vllm.models import path_of
from tests.integrations.vllm.played.copies import Copier
from tests.integrations.vllm.played.engine import Build, PlayedEngine
from tests.integrations.vllm.played.pool import PlayedPool
from tests.integrations.vllm.played.rank import Rank
from tests.integrations.vllm.played.session import PlayedSession, Weather
from tests.integrations.vllm.played.stamps import BLOCK_TOKENS, VOCABULARY_TOKENS, Memory, Rows

_BLOCKS: Final = 40
_PROMPT_TOKENS: Final = 9 * BLOCK_TOKENS
_STEP_TOKENS: Final = 2 * BLOCK_TOKENS + BLOCK_TOKENS // 2
_STEPS_AFTER: Final = 12


def main(mode: str) -> None:
    """Break a request off after its first step, and one after its second; see that all findable blocks are full."""
    logging.disable(logging.ERROR)
    chance = random.Random(5)  # noqa: S311 - nothing is secret
    is_offload = mode == "offload"
    pool, memory = PlayedPool(_BLOCKS), Memory(_BLOCKS)
    if mode == "owned":
        pool.claim("e0")
    build = Build(
        modes=(mode,),
        model=str(path_of("llama")),
        num_blocks=_BLOCKS,
        windows=(0,),
        is_async=False,
        step_tokens_max=_STEP_TOKENS,
        requests_max=6,
        retention_interval=None,
    )
    identity: Identity = (("tables" if is_offload else "device", 1, 1),)
    session = PlayedSession("e0", pool, identity, Weather(losses=0, outages=0), chance)
    rank, rows = Rank(memory, (0,)), Rows(identity, _BLOCKS)
    copier = Copier(rank, lambda: rows, has_one_group=True, device=None) if is_offload else None
    engine = PlayedEngine(build, [session], rank, copier, chance)
    prompt = [chance.randrange(VOCABULARY_TOKENS) for _ in range(_PROMPT_TOKENS)]
    for num_steps, tokens in ((1, prompt), (2, prompt[::-1])):
        engine.ask(tokens, 5, wants_logprobs=False)
        for _ in range(num_steps):
            engine.advance()
            engine.settle()
        (name,) = engine.running()
        engine.break_off(name)
        for _ in range(_STEPS_AFTER):
            engine.advance()
            engine.settle()
    slots = {
        block: rows[block].slots if is_offload else memory.at(block) for block in pool.findable
    }
    hollow = [block for block, written in slots.items() if len(written) < BLOCK_TOKENS]
    assert not hollow, f"blocks {hollow} are findable, and nobody has filled them"
    assert slots, "nothing was published"


if __name__ == "__main__":
    main(sys.argv[1])
