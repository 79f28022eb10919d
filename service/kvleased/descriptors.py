"""Own the receiving of packets with descriptors beside them; what they mean is the receivers' business.

`socket.recv_fds` ignores its flags, so that neither MSG_DONTWAIT nor MSG_CMSG_CLOEXEC would reach the kernel.
"""

import array
import os
import socket
from typing import Final

ADVICE: Final = "raise the limit of descriptors (ulimit -n, LimitNOFILE), or lower max_connections"
"""What is to be done where this process may have no more."""
_BYTES_PER_FD: Final = array.array("i").itemsize


class DescriptorsLostError(Exception):
    """This process has no room for the descriptors beside a packet: they are lost, `packet` is not."""

    def __init__(self, packet: bytes) -> None:
        """Keep the packet."""
        super().__init__("descriptors are lost, as this process may have no more")
        self.packet = packet


def receive_packet(
    sock: socket.socket, bytes_max: int, fds_max: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Return one packet, empty at the end, and its descriptors, which no child of ours inherits.

    Raises:
        BlockingIOError: there is none, and the flags or the socket say not to wait.
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
