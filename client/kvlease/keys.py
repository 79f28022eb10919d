"""Own the names of blocks' contents: a keyed 256-bit hash chain per tenant; who finds what under them is the daemon's.

    root    = blake3(tenant key; label, layout fingerprint, model digest, adapter, salt), each field behind its length
    key[i]  = blake3(tenant key; key[i-1] ‖ tokens of block i as little-endian int32),   key[-1] = root

A key therefore names the block's own tokens, all tokens before it and the context they were computed in, and means
nothing to a tenant with another key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.geometry import full_blocks
from kvlease.ids import BYTES_PER_KEY
from kvlease.units import TOKENS_MAX, checked_count

BYTES_PER_TENANT_KEY: Final = 32
"""Bytes of a tenant's key, as attach hands it over."""

_LABEL: Final = b"kvlease block key 1"
_BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """Name the blocks of one tenant in one context."""

    tenant_key: bytes = field(repr=False)
    layout_fingerprint: str
    model_digest: str
    adapter: str = ""
    salt: str = ""
    """Anything else that must not share: a user, an image's digest."""

    @property
    def root(self) -> bytes:
        """The parent of every first block."""
        fields = (self.layout_fingerprint, self.model_digest, self.adapter, self.salt)
        parts = [_LABEL]
        for text in fields:
            encoded = text.encode()
            parts += [len(encoded).to_bytes(8, "little"), encoded]
        return blake3(b"".join(parts), key=self._checked_key).digest()

    def chain(
        self, tokens: Sequence[int] | NDArray[np.int32], tokens_per_block: int, parent: bytes = b""
    ) -> bytes:
        """Return the packed 32-byte keys of the full blocks of `tokens`; what follows the last full block has none.

        With `parent`, the key of the block before them, the tokens go on from there, else they start a request.

        Raises:
            InvalidError: a token is no int32, the parent no key, or the tenant's key not 32 bytes.
        """
        checked_count("tokens_per_block", tokens_per_block, least=1, most=TOKENS_MAX)
        if parent and len(parent) != BYTES_PER_KEY:
            message = f"a parent key has {BYTES_PER_KEY} bytes, not {len(parent)}"
            raise InvalidError(
                message, resource="parent", need=BYTES_PER_KEY, available=len(parent)
            )
        packed = _packed_tokens(tokens)
        bytes_per_step = tokens_per_block * _BYTES_PER_TOKEN
        num_blocks = full_blocks(len(packed), bytes_per_step)
        tenant_key = self._checked_key
        key = parent or self.root
        keys = []
        for start in range(0, num_blocks * bytes_per_step, bytes_per_step):
            key = blake3(key + packed[start : start + bytes_per_step], key=tenant_key).digest()
            keys.append(key)
        return b"".join(keys)

    @property
    def _checked_key(self) -> bytes:
        if len(self.tenant_key) != BYTES_PER_TENANT_KEY:
            message = f"a tenant key has {BYTES_PER_TENANT_KEY} bytes, not {len(self.tenant_key)}"
            raise InvalidError(
                message,
                resource="tenant_key",
                need=BYTES_PER_TENANT_KEY,
                available=len(self.tenant_key),
            )
        return self.tenant_key


def _packed_tokens(tokens: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Return the tokens as little-endian int32, or refuse them."""
    try:
        given = np.asarray(tokens)
    except ValueError as error:
        raise InvalidError(
            "tokens must be a flat sequence of integers", resource="tokens"
        ) from error
    if given.size == 0:
        return b""
    if given.ndim != 1 or given.dtype.kind not in "iu":
        message = f"tokens must be a flat sequence of integers, not {given.ndim}-dimensional {given.dtype}"
        raise InvalidError(message, resource="tokens")
    bounds = np.iinfo(np.int32)
    if int(given.min()) < bounds.min or int(given.max()) > bounds.max:
        message = f"token ids must fit in int32; these go from {given.min()} to {given.max()}"
        raise InvalidError(message, resource="tokens", limit=bounds.max)
    return given.astype("<i4", copy=False).tobytes()
