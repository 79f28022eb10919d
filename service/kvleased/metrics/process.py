"""Own the metrics of the processes themselves: their memory, their descriptors, and the lag of the event loop."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kvleased.memory.limits import memory_used
from kvleased.metrics.calls import BUCKETS, Latency
from kvleased.metrics.parts import Part

BEAT_SECONDS: Final = 0.1
"""Seconds between two beats of the pulse."""
SUPERVISOR: Final = "supervisor"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_ROLE_AT: Final = 4
"""The place of the role in the command line of a process that the supervisor started."""


class Pulse:
    """Measures how late the event loop calls a timer."""

    def __init__(self) -> None:
        """Start without a beat; `start` begins."""
        self.lag = Latency()
        self._due = 0.0
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Beat in the running loop until `stop`."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + BEAT_SECONDS
        self._next = loop.call_at(self._due, self._beat)

    def stop(self) -> None:
        """Stop beating."""
        if self._next is not None:
            self._next.cancel()

    def _beat(self) -> None:
        self.lag.observe(max(0.0, asyncio.get_running_loop().time() - self._due))
        self.start()


def ends(part: Part, control_restarts: Mapping[str, int], mover_ends: Mapping[str, int]) -> None:
    """Add how often processes were replaced: the control process by reason, movers by kind."""
    part.begin("control_restarts", "mover_ends")
    for reason, count in control_restarts.items():
        part.add("control_restarts", count, reason)
    for mover, count in mover_ends.items():
        part.add("mover_ends", count, mover)


def processes(part: Part, pulse: Pulse, pools_bytes: int = 0) -> None:
    """Add what the kernel tells about the daemon's processes, beside their pools, and the lag of the event loop."""
    lag = pulse.lag
    part.add_histogram("loop_lag_seconds", BUCKETS, lag.counts, lag.seconds)
    used, limit = memory_used()
    part.add("memory_used_bytes", used)
    part.add("memory_limit_bytes", limit)
    part.add("memory_pools_bytes", pools_bytes)
    part.begin("process_private_bytes", "process_open_fds")
    for role, process in _processes():
        try:
            _, resident, shared, *_ = (process / "statm").read_text().split()
            num_fds = len(os.listdir(process / "fd"))  # noqa: PTH208 - names are enough
        except OSError:
            # The process has just ended, or belongs to another user.
            continue
        private_bytes = (int(resident) - int(shared)) * _PAGE_BYTES
        part.add("process_private_bytes", private_bytes, role)
        part.add("process_open_fds", num_fds, role)


def _processes() -> Iterator[tuple[str, Path]]:
    """Yield the supervisor and its children by role; only this process if no supervisor has started it."""
    proc = Path("/proc")
    parent = os.getppid()
    own = _arguments(proc / "self")
    if len(own) <= _ROLE_AT or own[_ROLE_AT - 1] != "kvleased":
        yield "control", proc / "self"
        return
    yield SUPERVISOR, proc / str(parent)
    try:
        children = (proc / str(parent) / "task" / str(parent) / "children").read_text().split()
    except OSError:
        children = [str(os.getpid())]
    for child in children:
        arguments = _arguments(proc / child)
        if len(arguments) > _ROLE_AT:
            yield arguments[_ROLE_AT], proc / child


def _arguments(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text().split("\0")
    except OSError:
        return []
