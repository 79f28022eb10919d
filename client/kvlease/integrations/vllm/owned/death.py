"""Own the proof that a daemon's control process has ended: nobody listens at its socket.

A process that is only stopped still listens.
"""

import errno
import socket
from typing import Final

_PREFIX: Final = "unix://"
_PROOFS: Final = (errno.ECONNREFUSED, errno.ENOENT)
_DEADLINE_SECONDS: Final = 0.1


def is_dead(address: str) -> bool:
    """Tell whether it is proven that nobody serves at an address; False if it is not known."""
    if not address.startswith(_PREFIX):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_DEADLINE_SECONDS)
        return asking.connect_ex(address.removeprefix(_PREFIX)) in _PROOFS
