"""Own how the supervisor starts a child and learns of its end; when to start one is the supervisor's business."""

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

CONTROL: Final = "control"
MOVER: Final = "mover"
DISK_MOVER: Final = "disk-mover"
REMOTE_MOVER: Final = "remote-mover"
MOVERS: Final = (MOVER, DISK_MOVER, REMOTE_MOVER)
"""The roles of the processes that move bytes; each can be killed and started again alone."""

SUPERVISORS_FDS: Final = 64
"""Descriptors by which the supervisor's limit is above that of its children: for itself, and to start others."""
_PR_SET_PDEATHSIG: Final = 1
_TUNABLES: Final = "GLIBC_TUNABLES"
_WRITE_PAST_CACHES: Final = "glibc.cpu.x86_non_temporal_threshold"
WRITE_PAST_CACHES_BYTES: Final = 20 << 10
"""Bytes from which on a mover's memcpy writes past the processor's caches, which are smaller than pools anyway.

So the targets need not be read into the caches first. glibc accepts nothing below 16 KiB; other C libraries and
processors ignore it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A child process and a descriptor that becomes readable when it ends."""

    role: str
    process: subprocess.Popen[bytes]
    pidfd: int
    started: float = field(default_factory=time.monotonic)

    def ends(self, within_seconds: float | None) -> bool:
        """Wait until the kernel says that the child is gone, so that it writes no more; None waits without limit."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(None if within_seconds is None else within_seconds * 1e3))

    def reap(self) -> int:
        """Return the status of a child that has ended, without waiting: -9 if a debugger withholds the status."""
        status = self.process.poll()
        os.close(self.pidfd)
        return -signal.SIGKILL if status is None else status


def movers_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the roles of the movers that a daemon with these settings has."""
    is_wanted = {
        MOVER: True,
        DISK_MOVER: settings["disk_dir"],
        REMOTE_MOVER: settings["remote_url"],
    }
    return tuple(role for role in MOVERS if is_wanted[role])


def spawn(role: str, fds: Mapping[str, int], lock_fds: Sequence[int] = ()) -> Child:
    """Start `kvleased <role>` as a new program with the named descriptors and no others, so it gets no state of ours.

    A lock on a directory is held until the last process with its descriptor has ended, so `lock_fds` keep other daemons
    out for as long as the child may write there.

    Raises:
        OSError: the kernel has no descriptor, memory or process for it.
    """
    arguments = [sys.executable, "-P", "-m", "kvleased", role]
    arguments += ["--parent", str(os.getpid()), "--spawned", str(time.monotonic())]
    for name, fd in fds.items():
        arguments += [f"--{name}-fd", str(fd)]
    process = subprocess.Popen(  # noqa: S603
        arguments,
        stdin=subprocess.DEVNULL,
        pass_fds=(*fds.values(), *lock_fds),
        env=_for_copies(os.environ) if role in MOVERS else None,
    )
    try:
        return Child(role=role, process=process, pidfd=os.pidfd_open(process.pid))
    except OSError:
        process.kill()
        process.wait()
        raise


def _for_copies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a mover; the operator's value of the same tunable is kept."""
    told = environment.get(_TUNABLES, "")
    if _WRITE_PAST_CACHES in told:
        return dict(environment)
    tunable = f"{_WRITE_PAST_CACHES}={WRITE_PAST_CACHES_BYTES:#x}"
    return {**environment, _TUNABLES: f"{told}:{tunable}" if told else tunable}


def leave_descriptors() -> None:
    """Lower this process's limit of descriptors below the supervisor's, which keeps descriptors for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft // 2, soft - SUPERVISORS_FDS), hard))


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, so that nothing outlives the supervisor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have ended before the line above took effect.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def give_way() -> None:
    """Keep this process from preempting the one that wakes it: its work is long, so it can wait for a free core.

    Otherwise, on a machine whose cores are all busy, the process that hands it a batch loses its core, and goes on only
    when the scheduler gives it one again, some milliseconds later.
    """
    # A sandbox may forbid it.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
