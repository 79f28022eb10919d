"""Own the proofs of a worker's death: pidfds, which become readable when its process has ended."""

import os
import select

from kvlease.errors import InvalidError, UnknownWorkerError, WrongStateError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller


def own_pidfd(caller: Caller) -> int | None:
    """Return a pidfd of the caller that the daemon owns, or None if there can be none.

    Raises:
        InvalidError: the descriptor that the caller sent is not a pidfd of its process.
        UnknownWorkerError: the process has ended.
    """
    if caller.pidfd is not None:
        _require_own(caller.pidfd, caller.peer_pid)
        return os.dup(caller.pidfd)
    if caller.peer_pid <= 0:
        return None
    try:
        return os.pidfd_open(caller.peer_pid)
    except ProcessLookupError:
        message = "the process that sent the call has ended"
        raise UnknownWorkerError(message, resource="peer_pid") from None


def require_proof(request: pb.AttachRequest, pidfd: int | None) -> None:
    """Refuse a magazine to a process whose death cannot be proven: its blocks might stay held for ever."""
    if request.magazine and pidfd is None:
        message = (
            "a magazine needs a worker whose death can be proven; attach over the local socket"
        )
        raise WrongStateError(message, resource="magazine", rule="no_death_proof")


def _require_own(fd: int, peer_pid: int) -> None:
    """Refuse a descriptor that is not a pidfd of the caller: it might become readable at any time, or never.

    If the caller is in another PID namespace, the kernel does not tell its process id, and only the kind is checked.
    """
    with open(f"/proc/self/fdinfo/{fd}") as info:  # noqa: PTH123 -- a file of the kernel
        pids = [int(line.removeprefix("Pid:")) for line in info if line.startswith("Pid:")]
    advice = "send a pidfd of the calling process"
    if not pids:
        message = f"the descriptor sent with attach is not a pidfd; {advice}"
        raise InvalidError(message, resource="pidfd")
    if peer_pid > 0 and pids != [peer_pid]:
        message = f"the pidfd sent with attach is not that of process {peer_pid}, which connected; {advice}"
        raise InvalidError(message, resource="pidfd", rule="other_process")


def process_of(pidfd: int) -> int:
    """Return the process id of a pidfd; 0 if another PID namespace hides it, or if the process has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:  # noqa: PTH123 -- a file of the kernel
        found = [int(line.removeprefix("Pid:")) for line in info if line.startswith("Pid:")]
    return max(0, *found, 0)


def same_process(one: int, other: int) -> bool:
    """Tell whether two pidfds are of one process; older kernels cannot tell them apart, so the answer is then yes."""
    return os.fstat(one).st_ino == os.fstat(other).st_ino


def has_ended(pidfd: int) -> bool:
    """Tell whether a process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
