"""Own what stands for tokens beside their ids (images, audio, embeddings), and what of it goes into a block's key.

A key's hashing is `keys`' business; this module only says, for each block, which bytes are to be hashed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.geometry import ceil_div, floor_div
from kvlease.units import TOKENS_MAX, checked_count

_VECTORS_DIMENSIONS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextItem:
    """Something that a stretch of placeholder tokens stands for: an image, an audio clip."""

    digest: bytes | str
    """What names the content and how it was processed; text counts as its UTF-8 bytes."""
    first_token: int
    """Counted as the method that takes the item says."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddedSpan:
    """A stretch of tokens whose input are vectors instead of ids; whatever ids are given there count, too."""

    vectors: NDArray[Any]
    """[tokens, numbers]; what NumPy has no type for goes as integers of its width."""
    first_token: int
    """Counted as the method that takes the span says."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the vectors are for."""
        return len(self.vectors)


Item = ContextItem | EmbeddedSpan


def contexts_of(
    items: Sequence[Item], tokens_per_block: int, num_blocks: int, first_token: int = 0
) -> dict[int, bytes]:
    """Return, of each of `num_blocks` that an item overlaps, the bytes that say which and where.

    `first_token` is where block 0 starts in the count of the items. A block's bytes depend on nothing behind its end
    but the number of tokens of a ContextItem.

    Raises:
        InvalidError: an item has no digest, no tokens, vectors of an unfit shape, or a place beyond all requests.
    """
    parts: dict[int, list[tuple[int, bytes]]] = {}
    for item in items:
        start, num_tokens = _checked_place(item)
        start -= first_token
        first = max(0, floor_div(start, tokens_per_block))
        end = min(num_blocks, ceil_div(start + num_tokens, tokens_per_block))
        for block in range(first, end):
            offset = start - block * tokens_per_block
            if isinstance(item, ContextItem):
                part = _item_bytes(item, offset)
            else:
                part = _span_bytes(item, offset, tokens_per_block)
            parts.setdefault(block, []).append((offset, part))
    # The order in which items are given says nothing.
    return {block: b"".join(part for _, part in sorted(found)) for block, found in parts.items()}


def _item_bytes(item: ContextItem, offset: int) -> bytes:
    """Return an item that starts at `offset` of a block: a negative one where it began in an earlier block."""
    digest = item.digest.encode() if isinstance(item.digest, str) else item.digest
    return b"I" + _packed(offset, item.num_tokens, len(digest)) + digest


def _span_bytes(span: EmbeddedSpan, offset: int, tokens_per_block: int) -> bytes:
    """Return the vectors of one block, of a span that starts at `offset` of it."""
    vectors = np.asarray(span.vectors)
    rows = np.ascontiguousarray(vectors[max(0, -offset) : tokens_per_block - offset])
    dtype = f"{rows.dtype.str} {rows.dtype.name}".encode()
    numbers = _packed(max(0, offset), *rows.shape, len(dtype))
    return b"E" + numbers + dtype + blake3(rows.view(np.uint8).data).digest()


def _packed(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)


def _checked_place(item: Item) -> tuple[int, int]:
    """Return where an item starts and how many tokens it is for, or refuse it."""
    start = checked_count("first_token", item.first_token, least=-TOKENS_MAX, most=TOKENS_MAX)
    if isinstance(item, ContextItem):
        if not isinstance(item.digest, bytes | str) or not item.digest:
            raise InvalidError("an item needs a digest of its content", resource="digest")
    else:
        vectors = np.asarray(item.vectors)
        if vectors.ndim != _VECTORS_DIMENSIONS or vectors.dtype.hasobject or not vectors.size:
            message = (
                f"embeddings must be [tokens, numbers], not {vectors.shape} of {vectors.dtype}"
            )
            raise InvalidError(message, resource="vectors")
    return start, checked_count("num_tokens", item.num_tokens, least=1, most=TOKENS_MAX)
