"""Own the proof that a daemon has ended, and its memory with it: nobody listens at its socket, nor holds its lock.

A process that is only stopped still listens. While a control process is replaced nobody listens either, but the
supervisor holds the lock: the next one finds all blocks again.
"""

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Final

from kvlease._runtime import LOCK_FILE

_PREFIX: Final = "unix://"
_PROOFS: Final = (errno.ECONNREFUSED, errno.ENOENT)
_DEADLINE_SECONDS: Final = 0.1


def is_dead(address: str) -> bool:
    """Tell whether it is proven that nobody serves at an address, or will over the same memory; False if unknown."""
    if not address.startswith(_PREFIX):
        return False
    path = address.removeprefix(_PREFIX)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_DEADLINE_SECONDS)
        is_refused = asking.connect_ex(path) in _PROOFS
    return is_refused and not _may_be_held(Path(path).with_name(LOCK_FILE))


def _may_be_held(lock_file: Path) -> bool:
    """Tell whether a supervisor may hold a lock; one that starts just now waits for longer than this has it."""
    try:
        fd = os.open(lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error.errno != errno.ENOENT
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
