"""Own entering the pages of a mapping into this process's page table, so that touching one takes no fault later."""

import ctypes
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
# Unlike the mmap module's madvise, this one lets other threads run meanwhile.
_madvise: Final = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


def enter_pages(region: NDArray[np.uint8]) -> bool:
    """Enter the pages of a mapped region, which begins at a page; a page that is lacking is made, none is changed.

    Returns whether all are entered: before Linux 5.14 none is, and without memory some may be lacking.
    """
    advice = _MADV_POPULATE_WRITE if region.flags.writeable else _MADV_POPULATE_READ
    return not _madvise(region.ctypes.data, region.nbytes, advice)
