"""Own the law that a request which is preempted in the step that gave it blocks leaves no block that nobody computed.

Run with the reference engine's Python and a mode. Two requests get blocks in turn until none is left; then the later
one, which goes before the other by its priority, needs a block in the step in which the other is to fill its last ones.
If that is only one, vLLM hands it to the later request at once; so where vLLM's own pool is used, it is to fill two.
"""

import logging
import random
import sys
from typing import Any, Final

from tests.integrations.vllm.played.alone import alone
from tests.integrations.vllm.played.stamps import BLOCK_TOKENS, VOCABULARY_TOKENS

_BLOCKS: Final = 18
_BLOCKS_OF_CHUNKS: Final = 11
_LOW_TOKENS: Final = 3 * BLOCK_TOKENS - 2
_LOW_TOKENS_OF_CHUNKS: Final = 9 * BLOCK_TOKENS
_HIGH_TOKENS: Final = 2 * BLOCK_TOKENS
_STEPS_MAX: Final = 300
_STEPS_AFTER: Final = 10


def main(mode: str) -> None:
    """Play until the preemption and a little longer, and see that all findable blocks are full."""
    logging.disable(logging.ERROR)
    chance = random.Random(5)  # noqa: S311 - this seed shows the mistake in both modes
    is_offload = mode == "offload"
    num_blocks = _BLOCKS_OF_CHUNKS if is_offload else _BLOCKS
    engine, pool, memory, _ = alone(
        mode,
        num_blocks,
        chance,
        step_tokens_max=(4 if is_offload else 3) * BLOCK_TOKENS,
        policy="priority",
        chunk_tokens_max=2 * BLOCK_TOKENS if is_offload else 0,
    )
    low_tokens = _LOW_TOKENS_OF_CHUNKS if is_offload else _LOW_TOKENS
    for num_tokens, priority in ((low_tokens, 5), (_HIGH_TOKENS, 0)):
        prompt = [chance.randrange(VOCABULARY_TOKENS) for _ in range(num_tokens)]
        engine.ask(prompt, _STEPS_MAX, wants_logprobs=False, priority=priority)
        engine.advance()
        engine.settle()
    left = _STEPS_AFTER
    for _ in range(_STEPS_MAX):
        engine.advance()
        engine.settle()
        findable = _named(engine) if is_offload else pool.findable
        hollow = [block for block in findable if len(memory.at(block)) < BLOCK_TOKENS]
        assert not hollow, f"blocks {hollow} are findable, and nobody has filled them"
        left -= bool(engine.num_preemptions)
        if not left:
            break
    assert engine.num_preemptions, "the pool is too large"


def _named(engine: Any) -> list[int]:
    """Return the blocks that requests can find in the engine's own pool."""
    blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
    return [block.block_id for block in blocks if block.block_hash is not None]


if __name__ == "__main__":
    main(sys.argv[1])
