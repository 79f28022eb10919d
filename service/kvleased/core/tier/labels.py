"""Own the label of a block, which travels with its bytes to a store, so that no other bytes are taken for them."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import BYTES_PER_KEY

LABEL: Final = np.dtype(
    [
        ("key", f"V{BYTES_PER_KEY}"),
        ("tenant", "<u8"),
        ("generation", "<u8"),
        ("position", "<u4"),
        ("spare", "<u4"),
    ]
)
"""Key, tenant digest, generation of the disk slot (0 for the remote store), and index of the block in its chain."""

BYTES_PER_LABEL: Final = LABEL.itemsize

_KEY: Final = np.dtype(f"V{BYTES_PER_KEY}")


def pack_labels(
    keys: bytes,
    tenants: int | NDArray[np.uint64],
    positions: NDArray[np.unsignedinteger | np.signedinteger],
    generations: int | NDArray[np.uint64] = 0,
) -> bytes:
    """Return the packed labels of blocks with packed keys."""
    labels = np.zeros(len(keys) // BYTES_PER_KEY, LABEL)
    labels["key"] = np.frombuffer(keys, _KEY)
    labels["tenant"] = tenants
    labels["position"] = positions
    labels["generation"] = generations
    return labels.tobytes()
