"""Own items, the inputs that token ids do not tell (images, audio, embeddings), and their bytes in a block's key.

Hashing is `keys`' business; this module only says which bytes are to be hashed for each block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvlease._checks import check_encodable, check_type, wrong_type
from kvlease.errors import InvalidError
from kvlease.geometry import ceil_div, floor_div
from kvlease.units import TOKENS_MAX, checked_count

_VECTORS_DIMENSIONS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextItem:
    """An image, an audio clip or the like, for which a stretch of placeholder tokens stands."""

    digest: bytes | str
    """A name of the content and of how it was processed; text counts as its UTF-8 bytes."""
    first_token: int
    """The item's first token; the method that takes the item says from where it counts."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddedSpan:
    """A stretch of tokens whose input is vectors instead of ids; the ids given for these tokens count, too."""

    vectors: NDArray[Any]
    """[tokens, numbers]; give numbers of a type that NumPy lacks as integers of the same width."""
    first_token: int
    """The span's first token; the method that takes the span says from where it counts."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the vectors are for."""
        return len(self.vectors)


Item = ContextItem | EmbeddedSpan


def check_items(items: object) -> None:
    """Refuse what is no sequence of items.

    Raises:
        InvalidError: rule wrong_type; the message names the first that is no item, and what is wanted.
    """
    if not isinstance(items, (list, tuple, Sequence)):
        raise wrong_type("items", "", "a list of ContextItem and EmbeddedSpan", items)
    for index, item in enumerate(items):
        check_type(f"items[{index}]", item, Item)


def contexts_of(
    items: Sequence[Item], tokens_per_block: int, num_blocks: int, first_token: int = 0
) -> dict[int, bytes]:
    """Return the bytes that name the items in a block and their places, for each block that an item overlaps.

    Blocks are counted from 0 to `num_blocks`; block 0 starts at `first_token`, counted as the items' own. A block's
    bytes depend on nothing behind the block's end but the number of tokens of a ContextItem.

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
    # Sorted, because the order in which items are given means nothing.
    return {block: b"".join(part for _, part in sorted(found)) for block, found in parts.items()}


def _item_bytes(item: ContextItem, offset: int) -> bytes:
    """Return the bytes of an item at `offset` in a block; the offset is negative if it began in an earlier block."""
    digest = item.digest.encode() if isinstance(item.digest, str) else item.digest
    return b"I" + _packed(offset, item.num_tokens, len(digest)) + digest


def _span_bytes(span: EmbeddedSpan, offset: int, tokens_per_block: int) -> bytes:
    """Return the bytes of a span's vectors in one block; the span starts at `offset` of the block."""
    vectors = np.asarray(span.vectors)
    rows = np.ascontiguousarray(vectors[max(0, -offset) : tokens_per_block - offset])
    dtype = f"{rows.dtype.str} {rows.dtype.name}".encode()
    numbers = _packed(max(0, offset), *rows.shape, len(dtype))
    return b"E" + numbers + dtype + blake3(rows.view(np.uint8).data).digest()


def _packed(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)


def _checked_place(item: Item) -> tuple[int, int]:
    """Return where an item starts and how many tokens it covers, or refuse it."""
    start = checked_count("first_token", item.first_token, least=-TOKENS_MAX, most=TOKENS_MAX)
    if isinstance(item, ContextItem):
        if not isinstance(item.digest, bytes | str) or not item.digest:
            raise InvalidError("an item needs a digest of its content", resource="digest")
        if isinstance(item.digest, str):
            check_encodable("digest", item.digest)
    else:
        try:
            vectors = np.asarray(item.vectors)
        except ValueError as error:
            message = f"embeddings must be [tokens, numbers]: {error}"
            raise InvalidError(message, resource="vectors") from error
        if vectors.ndim != _VECTORS_DIMENSIONS or vectors.dtype.hasobject or not vectors.size:
            message = (
                f"embeddings must be [tokens, numbers], not {vectors.shape} of {vectors.dtype}"
            )
            raise InvalidError(message, resource="vectors")
    return start, checked_count("num_tokens", item.num_tokens, least=1, most=TOKENS_MAX)
