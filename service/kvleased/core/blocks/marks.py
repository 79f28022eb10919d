"""Own the marks that tell the keys of one group from those of another, so that one index serves all groups.

A block of group g is kept under key XOR mark(g), where key is that of the block's last token in the request's chain.
mark(0) is 0, so a cache with one group keeps its blocks under the keys as they are sent.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import BYTES_PER_KEY

Words = NDArray[np.uint64]
"""[keys, words of a key]."""

WORDS_PER_KEY: Final = BYTES_PER_KEY // 8
_ODD: Final = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
_SHIFT: Final = np.uint64(29)


def marks(num_groups: int) -> Words:
    """Return the marks of the groups, [num_groups, words of a key]; they are part of the format of the records."""
    mixed = np.arange(num_groups * WORDS_PER_KEY, dtype=np.uint64)
    for odd in _ODD:
        mixed *= odd
        mixed ^= mixed >> _SHIFT
    mixed[:WORDS_PER_KEY] = 0
    return mixed.reshape(-1, WORDS_PER_KEY)


def key_words(keys: bytes) -> Words:
    """Return packed keys as words; an incomplete key at the end is left out."""
    num_keys = len(keys) // BYTES_PER_KEY
    return np.frombuffer(keys, np.uint64, num_keys * WORDS_PER_KEY).reshape(-1, WORDS_PER_KEY)
