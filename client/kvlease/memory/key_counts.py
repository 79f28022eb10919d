"""Own the key counts as a worker reads them: which keys of its tenant are surely not cached; the daemon writes them.

A region of key counts starts with a head of HEAD_BYTES, little endian: magic, version, a word that is 0 unless the
counts must not be believed, the number of buckets (a power of two), and the epoch of the daemon that writes it. Then
comes a uint32 for each bucket: the number of keys in it. A key's bucket is the low bits of its first 8 bytes.

A reader that misses a change made in this very instant calls a block absent that has just come, or cached that has just
left; neither error lasts. A region whose writer has ended says nothing, so the reader must know that the writer lives.
"""

import mmap
import struct
from collections.abc import Sequence
from typing import Final, Self

import numpy as np

from kvlease.memory.page_tables import enter_pages

MAGIC: Final = b"kvcounts"
VERSION: Final = 1
HEAD: Final = struct.Struct("<8sIIQQ")
HEAD_BYTES: Final = 64
BYTES_PER_COUNT: Final = 4
ASK_ALWAYS_AT: Final = 12
"""Offset in bytes of the word that is not 0 if the counts must not be believed."""

_BYTES_PER_WORD: Final = 8
_SLICE_BYTES: Final = 1 << 20
_ASK_ALWAYS_WORD: Final = ASK_ALWAYS_AT // BYTES_PER_COUNT
_HEAD_WORDS: Final = HEAD_BYTES // BYTES_PER_COUNT


def region_bytes(num_buckets: int) -> int:
    """Return the bytes of a region with `num_buckets` buckets."""
    return HEAD_BYTES + num_buckets * BYTES_PER_COUNT


class KeyCounts:
    """The counts of one tenant's cached keys, mapped for reading."""

    def __init__(self, mapped: mmap.mmap, num_buckets: int) -> None:
        """Read from a mapped region; `mapped` calls this."""
        self._words = memoryview(mapped).cast("I")
        self._mask = num_buckets - 1

    def __repr__(self) -> str:
        """Show life: how many buckets there are."""
        return f"<KeyCounts {self._mask + 1} buckets>"

    @classmethod
    def mapped(cls, fd: int, num_bytes: int, epoch: int) -> Self | None:
        """Map a region that came with an attach to this life of the daemon; None if the region is of another format.

        It is also None if another life of the daemon wrote the region. The caller must still close the descriptor; the
        mapping ends with the object.
        """
        mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        _map_ahead(mapping)
        magic, version, _, num_buckets, life = HEAD.unpack_from(mapping)
        if (magic, version, life) != (MAGIC, VERSION, epoch):
            return None
        is_whole = region_bytes(num_buckets) == num_bytes and num_buckets.bit_count() == 1
        return cls(mapping, num_buckets) if is_whole else None

    def absent(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell for each key whether it is surely not cached in any tier of the node."""
        words, mask, number = self._words, self._mask, int.from_bytes
        found = [
            not words[_HEAD_WORDS + (number(key[:_BYTES_PER_WORD], "little") & mask)]
            for key in keys
        ]
        # Read last, so that the counts are not believed if their writer withdrew them meanwhile.
        return [False] * len(keys) if words[_ASK_ALWAYS_WORD] else found


def _map_ahead(mapping: mmap.mmap) -> None:
    """Map all pages now, if the kernel can: nearly every key is on another page, and a fault takes longer than a look.

    This goes in slices of a millisecond or two, as no other thread can map anything during a slice.
    """
    pages = np.frombuffer(mapping, np.uint8)
    for first in range(0, len(pages), _SLICE_BYTES):
        enter_pages(pages[first : first + _SLICE_BYTES])


def num_buckets_for(num_blocks: int, buckets_per_block: int) -> int:
    """Return the least power of two that gives each of `num_blocks` at least `buckets_per_block` buckets."""
    return 1 << max(0, num_blocks * buckets_per_block - 1).bit_length()
