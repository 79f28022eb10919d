"""Own what becomes of mapped regions in a forked child: it can use none of them, even if it still has an address.

A child may live on after its parent's death is proven; what it wrote then would be in blocks that others have by then.
MADV_DONTFORK would take the mappings from the child but leave holes. Something else would come to lie in these, and the
child's copy of the mmap object would unmap that. So the mappings are covered with pages that can be neither read nor
written.
"""

import ctypes
import mmap
import os
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

_addresses: Final[WeakKeyDictionary[mmap.mmap, int]] = WeakKeyDictionary()
"""The address at which each region mapped by this process begins."""


def keep_from_children(region: mmap.mmap) -> None:
    """Have children that are forked from now on die of SIGSEGV if they touch a region."""
    _addresses[region] = np.frombuffer(region, np.uint8).ctypes.data


def _cover() -> None:
    """Cover the parent's regions, in a child that was just forked."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    for region, address in _addresses.items():
        if region.closed:
            continue
        if _LIBC.mmap(address, len(region), 0, flags, -1, 0) == _MAP_FAILED:
            os.abort()


os.register_at_fork(after_in_child=_cover)
