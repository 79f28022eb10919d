"""Own how vLLM's block hashes become the daemon's keys; what is found under the keys is the daemon's business.

    subkey(group) = blake3(tenant key; label ‖ identity's digest ‖ era, after its length ‖ group as 4 bytes)
    key           = blake3(subkey(group); block hash)

vLLM's hash covers the tokens of a block and all tokens before it, but not model, weights and layout; the identity does.
The era is empty until an engine is reset. In a new era the engine finds nothing that was computed in an earlier one.
Keys cannot be turned back into hashes, so an index that was restored from keys is looked up by the key of a hash.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from blake3 import blake3

BYTES_PER_GROUP: Final = 4
"""Bytes of the group's number, big endian, which vLLM writes after a hash."""

_LABEL: Final = b"kvlease vllm key 1"


class Rekeyer:
    """Turn hashes into keys for one tenant, identity and era; make anew when any of these changes. For one thread."""

    def __init__(self, tenant_key: bytes, digest: bytes, era: bytes = b"") -> None:
        """Remember the context; each group's hasher is made on first use."""
        self._tenant_key = tenant_key
        self._context = b"".join((_LABEL, digest, len(era).to_bytes(8, "little"), era))
        self._hashers: dict[int, blake3] = {}

    def keys(self, hashes: Iterable[bytes], group: int = 0) -> bytes:
        """Return the packed 32-byte keys of block hashes of one group."""
        return b"".join(self.each(hashes, group))

    def each(self, hashes: Iterable[bytes], group: int = 0) -> list[bytes]:
        """Return the keys of block hashes of one group, one by one."""
        # One hasher serves all hashes, because making a hasher is half the cost of hashing.
        hasher = self._hashers.get(group) or self._hasher(group)
        update, digest, reset = hasher.update, hasher.digest, hasher.reset
        keys: list[bytes] = []
        append = keys.append
        for block_hash in hashes:
            update(block_hash)
            append(digest())
            reset()
        return keys

    def key(self, hash_with_group: bytes) -> bytes:
        """Return the key of a hash that ends with its group's number, as vLLM's pool stores it."""
        group = int.from_bytes(hash_with_group[-BYTES_PER_GROUP:], "big")
        hasher = self._hashers.get(group) or self._hasher(group)
        hasher.update(hash_with_group[:-BYTES_PER_GROUP])
        key = hasher.digest()
        hasher.reset()
        return key

    def of_names(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the keys of hashes that end with their groups' numbers, in order."""
        if len(names) == 1:
            return [self.key(names[0])]
        marks = [name[-BYTES_PER_GROUP:] for name in names]
        hashes = [name[:-BYTES_PER_GROUP] for name in names]
        if marks and marks.count(marks[0]) == len(marks):
            return self.each(hashes, int.from_bytes(marks[0], "big"))
        keys: list[bytes] = []
        for mark, of_group in groupby(marks):
            first = len(keys)
            end = first + len(list(of_group))
            keys += self.each(hashes[first:end], int.from_bytes(mark, "big"))
        return keys

    def _hasher(self, group: int) -> blake3:
        context = self._context + group.to_bytes(BYTES_PER_GROUP, "big")
        subkey = blake3(context, key=self._tenant_key).digest()
        hasher = self._hashers[group] = blake3(key=subkey)
        return hasher


class RememberedKeys:
    """A memory of keys that were made lately: a block is looked up first, and published later."""

    def __init__(self, kept_max: int = 65_536) -> None:
        """Begin with no keys; when there are more than `kept_max`, all are forgotten."""
        self._kept_max = kept_max
        self._rekeyer: Rekeyer | None = None
        self._keys: dict[bytes, bytes] = {}

    def __repr__(self) -> str:
        """Show life: how many keys are remembered."""
        return f"<RememberedKeys {len(self._keys)}>"

    def of_names(self, rekeyer: Rekeyer, names: Sequence[bytes]) -> list[bytes]:
        """Return the keys of names, in order; a new rekeyer makes new keys."""
        keys = self._keys
        if rekeyer is not self._rekeyer or len(keys) > self._kept_max:
            self._rekeyer = rekeyer
            keys.clear()
        if new := [name for name in names if name not in keys]:
            turned = rekeyer.of_names(new)
            keys.update(zip(new, turned, strict=True))
            if len(new) == len(names):
                return turned
        return [keys[name] for name in names]
