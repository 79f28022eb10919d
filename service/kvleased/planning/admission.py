"""Own which requests can ever fit a plan; whether one fits now is the core's business."""

from kvlease.errors import NeverFitsError
from kvlease.geometry import blocks_covering, full_blocks
from kvlease.units import TOKENS_MAX


def largest_request_tokens(num_blocks: int, tokens_per_block: int) -> int:
    """Return the tokens of the longest request that `num_blocks` hold, in whole blocks: what admission counts in."""
    return min(num_blocks, full_blocks(TOKENS_MAX, tokens_per_block)) * tokens_per_block


def check_request(
    num_tokens: int, *, num_blocks: int, tokens_per_block: int, bytes_per_block: int
) -> int:
    """Return the blocks that a request of `num_tokens` takes.

    Raises:
        NeverFitsError: more than `num_blocks`; the message says what would fit and what pool would do.
    """
    need = blocks_covering(num_tokens, tokens_per_block)
    largest = largest_request_tokens(num_blocks, tokens_per_block)
    if num_tokens <= largest:
        return need
    message = (
        f"a request of {num_tokens} tokens needs {need} blocks of {tokens_per_block} tokens "
        f"and the pool has {num_blocks}; the largest request that fits has {largest} tokens, "
        f"and this one needs {need * bytes_per_block} bytes of device memory"
    )
    raise NeverFitsError(
        message, resource="device_blocks", need=need, available=num_blocks, limit=num_blocks
    )
