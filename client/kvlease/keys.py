"""Own block keys: a keyed 256-bit hash chain for each tenant; who finds what under a key is the daemon's business.

    root    = blake3(tenant key; label, layout fingerprint, model digest, adapter, salt), each field behind its length
    key[i]  = blake3(tenant key; key[i-1] ‖ tokens of block i as little-endian int32),   key[-1] = root
    and if items overlap block i:
    key[i]  = blake3(tenant key; label of items ‖ the key[i] above ‖ the items, as `items` writes them)

So a key names the block's own tokens and items, all those before them, and the context that they were computed in. It
means nothing to a tenant with another tenant key.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvlease._checks import check_encodable, check_type, wrong_type
from kvlease.errors import InvalidError
from kvlease.geometry import floor_div, full_blocks
from kvlease.ids import BYTES_PER_KEY
from kvlease.items import Item, check_items, contexts_of
from kvlease.units import TOKENS_MAX, checked_count

BYTES_PER_TENANT_KEY: Final = 32
"""Bytes of the tenant key that an attach hands over."""

_LABEL: Final = b"kvlease block key 1"
_ITEMS_LABEL: Final = b"kvlease block items 1"
_BYTES_PER_TOKEN: Final = 4

Tokens = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """The block keys of one tenant in one context; for another adapter or salt, use `dataclasses.replace`."""

    tenant_key: bytes = field(repr=False)
    layout_fingerprint: str
    """The digest that covers dtypes, tokens per block, placements and ranks."""
    model_digest: str
    adapter: str = ""
    """A digest or revision of the adapter's weights; a name will not do, as another adapter may get the same."""
    salt: str = ""
    """Anything else that separates requests that must not share blocks, such as a user."""

    @property
    def root(self) -> bytes:
        """The parent of every first block."""
        parts = [_LABEL]
        for name in ("layout_fingerprint", "model_digest", "adapter", "salt"):
            text = getattr(self, name)
            # Not by check_type: the root is made anew for each request, and this takes a tenth of the time.
            if not isinstance(text, str):
                raise wrong_type(name, "", "a string", text)
            if not text.isascii():
                check_encodable(name, text)
            encoded = text.encode()
            parts += [len(encoded).to_bytes(8, "little"), encoded]
        return blake3(b"".join(parts), key=self._checked_key).digest()

    def chain(
        self,
        tokens: Tokens,
        tokens_per_block: int,
        parent: bytes = b"",
        *,
        items: Sequence[Item] = (),
    ) -> bytes:
        """Return the packed 32-byte keys of the full blocks of `tokens`; tokens behind the last full block have none.

        With `parent`, the key of the block before them, the tokens go on from that block; without it they start a
        request. An item's `first_token` counts from the first of `tokens`. Give an item that began earlier but reaches
        into these blocks again, with a negative `first_token`.

        Raises:
            InvalidError: a token is no int32, the parent is no key, an item is malformed, or the tenant key does not
                have 32 bytes.
        """
        checked_count("tokens_per_block", tokens_per_block, least=1, most=TOKENS_MAX)
        check_type("parent", parent, bytes)
        if parent and len(parent) != BYTES_PER_KEY:
            message = f"a parent key must have {BYTES_PER_KEY} bytes, not {len(parent)}"
            raise InvalidError(
                message, resource="parent", need=BYTES_PER_KEY, available=len(parent)
            )
        check_items(items)
        packed = _packed_tokens(tokens)
        bytes_per_block = tokens_per_block * _BYTES_PER_TOKEN
        contexts = contexts_of(items, tokens_per_block, full_blocks(len(packed), bytes_per_block))
        return _chained(self._checked_key, parent or self.root, packed, bytes_per_block, contexts)

    def grow(self, tokens_per_block: int) -> "KeyChain":
        """Return the key chain of a new request, which takes tokens as they come.

        Raises:
            InvalidError: the tenant key does not have 32 bytes, or a block has no tokens.
        """
        checked_count("tokens_per_block", tokens_per_block, least=1, most=TOKENS_MAX)
        return KeyChain(self, tokens_per_block)

    @property
    def _checked_key(self) -> bytes:
        if not isinstance(self.tenant_key, bytes):
            raise wrong_type("tenant_key", "", "bytes", self.tenant_key)
        if len(self.tenant_key) != BYTES_PER_TENANT_KEY:
            message = (
                f"a tenant key must have {BYTES_PER_TENANT_KEY} bytes, not {len(self.tenant_key)}"
            )
            raise InvalidError(
                message,
                resource="tenant_key",
                need=BYTES_PER_TENANT_KEY,
                available=len(self.tenant_key),
            )
        return self.tenant_key


class KeyChain:
    """The keys of one growing request: each block is hashed once, when its last token comes.

    Append only tokens that stay; append draft tokens only once they are accepted.
    For a forked request, copy its parent's chain.
    """

    def __init__(self, block_keys: BlockKeys, tokens_per_block: int) -> None:
        """Start with no token; `BlockKeys.grow` calls this."""
        self._tokens_per_block = tokens_per_block
        self._tenant_key = block_keys.tenant_key
        self._parent = block_keys.root
        self._keys = bytearray()
        self._partial = b""
        self._items: list[Item] = []

    def __repr__(self) -> str:
        """Show life: how far the request has come."""
        return f"<KeyChain {self.num_tokens} tokens, {self.num_blocks} keys>"

    def __copy__(self) -> Self:
        """Return a chain that goes on by itself, as that of a forked request."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), _keys=bytearray(self._keys))
        return other

    @property
    def keys(self) -> bytes:
        """The packed keys of all full blocks."""
        return bytes(self._keys)

    @property
    def num_blocks(self) -> int:
        """Full blocks so far; each has a key."""
        return floor_div(len(self._keys), BYTES_PER_KEY)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, including those of the last, partial block."""
        return self._num_keyed_tokens + floor_div(len(self._partial), _BYTES_PER_TOKEN)

    def append(self, tokens: Tokens, *, items: Sequence[Item] = ()) -> bytes:
        """Take the next tokens, and return the packed keys of the blocks that they fill.

        An item's `first_token` counts from the start of the request. Give each item once, at the latest with the tokens
        that fill the first block that it overlaps.

        Raises:
            InvalidError: a token is no int32, or an item is malformed or starts in a block that has a key already.
        """
        check_items(items)
        first_token, tokens_per_block = self._num_keyed_tokens, self._tokens_per_block
        packed = self._partial + _packed_tokens(tokens)
        known = self._items
        if items:
            _check_order(items, first_token)
            # This refuses a malformed item now, not only when its block is full.
            contexts_of(items, tokens_per_block, 0, first_token)
            known = [*known, *items]
        bytes_per_block = tokens_per_block * _BYTES_PER_TOKEN
        num_blocks = full_blocks(len(packed), bytes_per_block)
        fresh = b""
        if num_blocks:
            contexts = contexts_of(known, tokens_per_block, num_blocks, first_token)
            fresh = _chained(self._tenant_key, self._parent, packed, bytes_per_block, contexts)
            self._keys += fresh
            self._parent = fresh[-BYTES_PER_KEY:]
            packed = packed[num_blocks * bytes_per_block :]
            end = self._num_keyed_tokens
            known = [item for item in known if item.first_token + item.num_tokens > end]
        self._partial, self._items = packed, known
        return fresh

    @property
    def _num_keyed_tokens(self) -> int:
        return self.num_blocks * self._tokens_per_block


class _Hashing:
    """One keyed hasher for a whole chain: making a hasher costs half as much as hashing a block."""

    def __init__(self, tenant_key: bytes, parent: bytes) -> None:
        self._hasher = blake3(key=tenant_key)
        self.key = parent
        self.keys: list[bytes] = []

    def add_blocks(self, packed: memoryview, bytes_per_block: int) -> None:
        """Add the keys of blocks that hold nothing but tokens."""
        update, digest, reset = self._hasher.update, self._hasher.digest, self._hasher.reset
        append, key = self.keys.append, self.key
        # Cutting all blocks at once takes half the time of one slice per block.
        for tokens in np.frombuffer(packed, f"V{bytes_per_block}").tolist():
            update(key + tokens)
            key = digest()
            append(key)
            reset()
        self.key = key

    def add_items(self, context: bytes) -> None:
        """Replace the last block's key by one that also covers the items in it."""
        self._hasher.update(b"".join((_ITEMS_LABEL, self.key, context)))
        self.key = self.keys[-1] = self._hasher.digest()
        self._hasher.reset()


def _chained(
    tenant_key: bytes,
    parent: bytes,
    packed: bytes,
    bytes_per_block: int,
    contexts: Mapping[int, bytes],
) -> bytes:
    """Return the packed keys of the full blocks of packed tokens; `contexts` has the items' bytes of some of them."""
    hashing = _Hashing(tenant_key, parent)
    view = memoryview(packed)[: full_blocks(len(packed), bytes_per_block) * bytes_per_block]
    start = 0
    for block in sorted(contexts):
        end = (block + 1) * bytes_per_block
        hashing.add_blocks(view[start:end], bytes_per_block)
        hashing.add_items(contexts[block])
        start = end
    hashing.add_blocks(view[start:], bytes_per_block)
    return b"".join(hashing.keys)


def _check_order(items: Sequence[Item], first_token: int) -> None:
    for item in items:
        if item.first_token < first_token:
            message = (
                f"an item that starts at token {item.first_token} was passed after the keys of the first {first_token} "
                "tokens were made; pass it together with the tokens that it overlaps"
            )
            raise InvalidError(
                message, resource="items", need=item.first_token, available=first_token
            )


def _packed_tokens(tokens: Tokens) -> bytes:
    """Return the tokens as little-endian int32, or refuse them."""
    if isinstance(tokens, list | tuple) and not (tokens and isinstance(tokens[0], bool)):
        # NumPy takes twice as long for a list.
        try:
            return struct.pack(f"<{len(tokens)}i", *tokens)
        except (struct.error, TypeError):
            pass  # what is wrong is told below
    try:
        given = np.asarray(tokens)
    except ValueError as error:
        raise InvalidError(
            "tokens must be a flat sequence of integers", resource="tokens"
        ) from error
    # NumPy gives empty input a float type, so only its dimensions are checked.
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        message = f"tokens must be a flat sequence of integers, not {given.ndim}-dimensional {given.dtype}"
        raise InvalidError(message, resource="tokens")
    if given.size and given.dtype != np.int32:
        bounds, least, most = np.iinfo(np.int32), int(given.min()), int(given.max())
        if least < bounds.min or most > bounds.max:
            message = f"token ids must fit in int32; these go from {least} to {most}"
            raise InvalidError(message, resource="tokens", limit=int(bounds.max))
    return given.astype("<i4", copy=False).tobytes()
