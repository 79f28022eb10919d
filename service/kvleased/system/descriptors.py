"""Own the receiving of packets that carry descriptors; what the packets mean is the receivers' business.

`socket.recv_fds` is not used because it ignores its flags: neither MSG_DONTWAIT nor MSG_CMSG_CLOEXEC would reach the
kernel.
"""

import array
import os
import socket
from typing import Final

ADVICE: Final = "raise the limit on descriptors (ulimit -n, LimitNOFILE), or lower max_connections or max_workers"
"""What to do when this process may have no more descriptors."""
_BYTES_PER_FD: Final = array.array("i").itemsize


class DescriptorsLostError(Exception):
    """The descriptors of a packet are lost, because this process may have no more; `packet` itself has arrived."""

    def __init__(self, packet: bytes) -> None:
        """Keep the packet."""
        super().__init__("descriptors were lost, because this process may not have any more")
        self.packet = packet


def receive_packet(
    sock: socket.socket, bytes_max: int, fds_max: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Return one packet, empty at the end, and its descriptors, which child processes do not inherit.

    Raises:
        BlockingIOError: there is no packet, and the flags or the socket say not to wait.
        DescriptorsLostError: this process may have no more descriptors.
    """
    space = socket.CMSG_SPACE(fds_max * _BYTES_PER_FD)
    packet, ancillary, message_flags, _ = sock.recvmsg(
        bytes_max, space, flags | socket.MSG_CMSG_CLOEXEC
    )
    assert not message_flags & socket.MSG_TRUNC, "packet cut off"
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _BYTES_PER_FD])
    if message_flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise DescriptorsLostError(packet)
    return packet, fds.tolist()
