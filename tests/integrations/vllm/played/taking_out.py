"""Own the law that a request which is preempted in the step that gave it blocks leaves no block that nobody computed.

Run with the reference engine's Python and a mode. Two requests get blocks in turn until none is left; then the later
one, which goes before the other by its priority, needs a block in the step in which the other is to fill its last one.
"""

import logging
import random
import sys
from typing import Final

from tests.integrations.vllm.models import path_of
from tests.integrations.vllm.played.engine import Build, PlayedEngine
from tests.integrations.vllm.played.pool import PlayedPool
from tests.integrations.vllm.played.rank import Rank
from tests.integrations.vllm.played.session import PlayedSession, Weather
from tests.integrations.vllm.played.stamps import BLOCK_TOKENS, VOCABULARY_TOKENS, Memory

_BLOCKS: Final = 18
_LOW_TOKENS: Final = 3 * BLOCK_TOKENS - 2
_HIGH_TOKENS: Final = 2 * BLOCK_TOKENS
_STEPS_MAX: Final = 300
_STEPS_AFTER: Final = 10


def main(mode: str) -> None:
    """Play until the preemption and a little longer, and see that all findable blocks are full."""
    logging.disable(logging.ERROR)
    chance = random.Random(5)  # noqa: S311 - this seed shows the mistake in both modes
    pool, memory = PlayedPool(_BLOCKS), Memory(_BLOCKS)
    if mode == "owned":
        pool.claim("e0")
    build = Build(
        modes=(mode,),
        model=str(path_of("llama")),
        num_blocks=_BLOCKS,
        windows=(0,),
        is_async=False,
        step_tokens_max=3 * BLOCK_TOKENS,
        requests_max=6,
        retention_interval=None,
        policy="priority",
    )
    weather = Weather(losses=0, outages=0)
    session = PlayedSession("e0", pool, (("device", 1, 1),), weather, chance)
    engine = PlayedEngine(build, [session], Rank(memory, (0,)), None, chance)
    for num_tokens, priority in ((_LOW_TOKENS, 5), (_HIGH_TOKENS, 0)):
        prompt = [chance.randrange(VOCABULARY_TOKENS) for _ in range(num_tokens)]
        engine.ask(prompt, _STEPS_MAX, wants_logprobs=False, priority=priority)
        engine.advance()
        engine.settle()
    left = _STEPS_AFTER
    for _ in range(_STEPS_MAX):
        engine.advance()
        engine.settle()
        hollow = [block for block in pool.findable if len(memory.at(block)) < BLOCK_TOKENS]
        assert not hollow, f"blocks {hollow} are findable, and nobody has filled them"
        left -= bool(engine.num_preemptions)
        if not left:
            break
    assert engine.num_preemptions == 1, "the pool is too large"


if __name__ == "__main__":
    main(sys.argv[1])
