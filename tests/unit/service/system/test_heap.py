"""Freed memory is kept by the process: large arrays that come and go cost no page faults."""

import subprocess
import sys

from kvleased.system.heap import APART_BYTES, KEPT_BYTES

NUM_ARRAYS = 12
BYTES_PER_ARRAY = 1 << 20
SOURCE = f"""
import ctypes
import numpy as np
from kvleased.system.heap import keep_freed_memory

if {{keeps}}:
    assert keep_freed_memory()

sbrk = ctypes.CDLL(None).sbrk
sbrk.restype, sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
begin = sbrk(0)
arrays = [np.ones({BYTES_PER_ARRAY}, np.uint8) for _ in range({NUM_ARRAYS})]
del arrays
print(sbrk(0) - begin)
"""


def bytes_kept(*, keeps: bool) -> int:
    """Return by how many bytes a process's heap has grown after arrays were made and freed."""
    command = [sys.executable, "-c", SOURCE.format(keeps=keeps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_memory_of_arrays_is_kept_for_the_next_ones() -> None:
    """By default the C library gives freed memory back, and the next array is faulted in anew; here it is kept."""
    assert BYTES_PER_ARRAY < APART_BYTES
    assert NUM_ARRAYS * BYTES_PER_ARRAY < KEPT_BYTES
    assert bytes_kept(keeps=False) < BYTES_PER_ARRAY
    assert bytes_kept(keeps=True) >= (NUM_ARRAYS - 1) * BYTES_PER_ARRAY
