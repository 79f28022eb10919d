"""Own the proofs of a worker's death: descriptors that become readable when its process has ended."""

import os
import select

from kvlease.errors import InvalidError, UnknownWorkerError, WrongStateError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.callers import Caller


def own_pidfd(caller: Caller) -> int | None:
    """Return a descriptor of our own that tells of the caller's end, or None where there can be none."""
    if caller.pidfd is not None:
        _require_pidfd(caller.pidfd)
        return os.dup(caller.pidfd)
    if caller.peer_pid <= 0:
        return None
    try:
        return os.pidfd_open(caller.peer_pid)
    except ProcessLookupError:
        message = "the process that sent the call has ended"
        raise UnknownWorkerError(message, resource="peer_pid") from None


def require_proof(request: pb.AttachRequest, pidfd: int | None) -> None:
    """Refuse a magazine to a process whose death cannot be proven: it would hold its blocks for ever."""
    if request.magazine and pidfd is None:
        message = (
            "a magazine needs a worker whose death can be proven; attach over the local socket"
        )
        raise WrongStateError(message, resource="magazine", rule="no_death_proof")


def _require_pidfd(fd: int) -> None:
    """Refuse a descriptor that is none of a process: it might never become readable, or at any time."""
    with open(f"/proc/self/fdinfo/{fd}") as info:  # noqa: PTH123 -- a file of the kernel
        if not any(line.startswith("Pid:") for line in info):
            message = "the descriptor beside attach is not a pidfd; send one of the calling process"
            raise InvalidError(message, resource="pidfd")


def same_process(one: int, other: int) -> bool:
    """Tell whether two pidfds are of one process; older kernels cannot tell processes apart and always say yes."""
    return os.fstat(one).st_ino == os.fstat(other).st_ino


def has_ended(pidfd: int) -> bool:
    """Tell whether a process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
