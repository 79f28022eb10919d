"""Own where client and server run while calls are measured: on two cores, apart from each other and both awake.

A virtual core that has nothing to do is halted, and to wake it takes up to 50 µs, but only from some 8 µs of idleness
on: a server that computes nothing would never pay for that, every other would pay twice a call. And where two processes
hand over to each other without a pause the scheduler may put both on one core, or not, from run to run.
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
"""The core of those that take turns."""

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
    """Keep two cores from being halted, by processes that only run when nobody else wants to."""
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
    """Keep this process on one core and what it starts by `for_servers` on another, both awake."""
    with awake():
        if len(ALL) > 1:
            os.sched_setaffinity(0, {min(ALL)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, ALL)


@contextmanager
def for_servers() -> Iterator[None]:
    """Start processes on the core that this process keeps off."""
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
    """Keep this process and what it starts on one core, for those that never run at once.

    The cores of a virtual machine share theirs with others' work, each with another's: two processes on two of them are
    slowed down by what has nothing to do with them, for minutes, to half their speed.
    """
    os.sched_setaffinity(0, {SHARED})
    try:
        yield
    finally:
        os.sched_setaffinity(0, ALL)
