"""Memory that was freed is kept: large arrays that come and go cost no page faults."""

import subprocess
import sys

from kvleased.heap import KEPT_BYTES

COUNT = 200
BYTES_PER_ARRAY = 100_000
SOURCE = f"""
import resource
import numpy as np
from kvleased.heap import keep_freed_memory

if {{keeps}}:
    assert keep_freed_memory()

def work():
    arrays = [np.full({BYTES_PER_ARRAY}, 1, np.uint8) for _ in range(4)]
    del arrays

work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({COUNT}):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, keeps: bool) -> int:
    """Return the page faults of making and freeing four arrays, again and again, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SOURCE.format(keeps=keeps)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_arrays_that_come_and_go_are_not_faulted_in_anew() -> None:
    """The C library gives memory back that the next array takes again; what is kept was faulted in once."""
    assert BYTES_PER_ARRAY * 4 < KEPT_BYTES
    assert faults(keeps=True) < COUNT < 10 * COUNT < faults(keeps=False)
