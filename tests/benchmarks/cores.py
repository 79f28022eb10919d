"""Own the placement of client and server in measurements: on two separate cores, both kept awake.

An idle virtual core is halted after some 8 µs, and waking it takes up to 50 µs: a server that computes nothing answers
sooner and would never pay for that, but any other would pay twice a call. And when two processes hand over to each
other without a pause, the scheduler may put both on one core or not, from run to run.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

ALL: Final = frozenset(os.sched_getaffinity(0))
"""The cores of this process."""
SHARED: Final = max(ALL)
"""The core of processes that take turns."""

_SPIN: Final = """
import os
os.sched_setaffinity(0, {%d})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == %d:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def awake() -> Iterator[None]:
    """Keep two cores from being halted, by processes that run only when the cores are idle."""
    source = [_SPIN % (core, os.getpid()) for core in sorted(ALL)[:2]]
    spinning = [subprocess.Popen([sys.executable, "-c", each]) for each in source]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@contextmanager
def apart() -> Iterator[None]:
    """Keep this process on one core, and processes started in `for_servers` on another, both awake."""
    with awake():
        if len(ALL) > 1:
            os.sched_setaffinity(0, {min(ALL)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, ALL)


@contextmanager
def for_servers() -> Iterator[None]:
    """Start processes on the core that this process leaves free."""
    own = os.sched_getaffinity(0)
    if own == ALL:
        yield
        return
    os.sched_setaffinity(0, {sorted(ALL)[1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


@contextmanager
def shared() -> Iterator[None]:
    """Keep this process and its children, which never run at once, on one core.

    Each core of a virtual machine shares a real one with the work of others, which for minutes may slow one of two
    processes on two cores to half its speed.
    """
    os.sched_setaffinity(0, {SHARED})
    try:
        yield
    finally:
        os.sched_setaffinity(0, ALL)
