"""Own the law that a request which ends by an error amid its prompt leaves no block that is filled in part.

Run with the reference engine's Python and a mode.
"""

import logging
import random
import sys
from typing import Final

from tests.integrations.vllm.played.alone import alone
from tests.integrations.vllm.played.stamps import BLOCK_TOKENS, VOCABULARY_TOKENS

_BLOCKS: Final = 40
_PROMPT_TOKENS: Final = 9 * BLOCK_TOKENS
_STEP_TOKENS: Final = 2 * BLOCK_TOKENS + BLOCK_TOKENS // 2
_STEPS_AFTER: Final = 12


def main(mode: str) -> None:
    """Break a request off after its first step, and one after its second; see that all findable blocks are full."""
    logging.disable(logging.ERROR)
    chance = random.Random(5)  # noqa: S311 - nothing is secret
    is_offload = mode == "offload"
    engine, pool, memory, rows = alone(mode, _BLOCKS, chance, step_tokens_max=_STEP_TOKENS)
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
