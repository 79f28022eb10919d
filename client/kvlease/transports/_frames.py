"""Own the frames of the local socket: a little-endian uint32 length, then one Call or Reply; sockets are elsewhere."""

import os
import socket
import stat
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError, EncodeError, Message

from kvlease.errors import InvalidError, KVLeaseError, UnavailableError
from kvlease.transports.base import Outgoing
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.faults import error_from_proto
from kvlease.wire.framing import BYTES_OF_LENGTH, call_frame, caller_fields, traceparent_field

FRAME_BYTES_MAX: Final = 64 * 2**20
"""Bytes of the largest reply that is accepted."""
PING_NUMBER: Final = 2**32 - 1
"""The call number of a stream's pings; a stream may be silent for long, but a ping is answered at once."""
_NOT_OURS: Final = "the peer does not speak kvlease"
_SCHEMES: Final = (
    "use unix:// with kvlease.sock, http+unix:// with http.sock, and grpc+unix:// with grpc.sock"
)
"""Advice on which of a daemon's sockets, all in one directory, belongs to which scheme."""
_BYTES_PER_FD: Final = array("i").itemsize
FDS_MAX: Final = 8
"""The most descriptors that may come with one reply."""


def encode(call: Outgoing, call_number: int) -> bytes:
    """Return the frame of a call.

    Raises:
        InvalidError: the call does not fit into a frame.
    """
    verb, request, _, token, epoch, key, cache, traceparent = call
    try:
        who = caller_fields(token, epoch, cache)
        if traceparent:
            who += traceparent_field(traceparent)
        return call_frame(verb, request.SerializeToString(), call_number, key, who)
    except (EncodeError, ValueError, OverflowError) as error:
        message = f"{verb} does not fit into a frame: {error}"
        raise InvalidError(message, resource="request") from error


def encode_cancel(call_number: int, cancels: int) -> bytes:
    """Return the frame that cancels an earlier call."""
    body = pb.Call(call_number=call_number, cancels=cancels).SerializeToString()
    return len(body).to_bytes(BYTES_OF_LENGTH, "little") + body


def encode_ping(call_number: int) -> bytes:
    """Return a frame without a request; every daemon refuses it at once.

    The refusal shows that the daemon lives, and that it has read the frames before this one.
    """
    body = pb.Call(call_number=call_number).SerializeToString()
    return len(body).to_bytes(BYTES_OF_LENGTH, "little") + body


def frame_bytes(head: bytes | bytearray | memoryview) -> int:
    """Return the bytes of the whole frame that begins with `head`.

    Raises:
        UnavailableError: the frame is longer than any of kvlease's, so the peer is no kvlease daemon.
    """
    body_bytes = int.from_bytes(head[:BYTES_OF_LENGTH], "little")
    if body_bytes > FRAME_BYTES_MAX:
        raise UnavailableError(
            f"{_NOT_OURS}: it announced a frame above the limit; {_SCHEMES}",
            resource="frame_bytes",
            need=body_bytes,
            limit=FRAME_BYTES_MAX,
        )
    return BYTES_OF_LENGTH + body_bytes


def decode(body: bytes | bytearray | memoryview) -> pb.Reply:
    """Read the message of a frame.

    Raises:
        UnavailableError: it is not a Reply.
    """
    try:
        return pb.Reply.FromString(body)  # type: ignore[arg-type]  # it takes any buffer
    except DecodeError as error:
        raise UnavailableError(f"{_NOT_OURS}: a frame held no reply; {_SCHEMES}") from error


def response_of(reply: pb.Reply) -> Message:
    """Return what a reply carries, or raise the error that it carries."""
    kind = reply.WhichOneof("response")
    if kind is None:
        message = "the daemon answered with a response that this library does not know; update the library"
        raise UnavailableError(message)
    if kind == "error":
        raise error_from_proto(reply.error)
    response: Message = getattr(reply, kind)
    return response


def unreachable(path: str, cause: BaseException | None) -> UnavailableError:
    """Return the error of a connection that could not be made, or that broke."""
    text = cause.strerror or str(cause) if isinstance(cause, OSError) else ""
    reason = _no_socket(path) or text or "the connection was closed"
    also = ""
    if isinstance(cause, PermissionError):
        also = "; its socket is for the daemon's own user and root alone, so run as that user"
    return UnavailableError(
        f"the daemon at unix://{path} cannot be reached ({reason}); check its address, and that it is running{also}"
    )


def _no_socket(path: str) -> str:
    """Return what is at a path instead of a socket; empty if it is a socket, or if nothing is known."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return ""
    if stat.S_ISSOCK(mode):
        return ""
    return "it is a directory, not a socket" if stat.S_ISDIR(mode) else "it is not a socket"


def send_attach(sock: socket.socket, frame: bytes) -> None:
    """Send an attach, with a pidfd of this process, by which the daemon will learn of the process's death."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except OSError:  # an old or emulated kernel: the daemon then answers death_proof = "none"
        sock.sendall(frame)
        return
    try:
        num_sent = socket.send_fds(sock, [frame], [pidfd])
    finally:
        os.close(pidfd)
    sock.sendall(frame[num_sent:])


def receive_attached(
    sock: socket.socket, received: bytearray | None = None
) -> tuple[pb.Reply, list[int]]:
    """Receive a reply, which may begin in `received`, and the descriptors with it, which the caller must close."""
    fds: list[int] = []
    received = bytearray() if received is None else received
    try:
        while len(received) < BYTES_OF_LENGTH or len(received) < frame_bytes(received):
            received += _chunk(sock, fds)
        return decode(received[BYTES_OF_LENGTH:]), fds
    except BaseException:
        close_all(fds)
        raise


def late_token(sock: socket.socket, received: bytearray) -> str:
    """Return the token in the answer to an attach that nobody waits for any more; empty if no answer has come.

    No answer can come after this: the daemon notices that nobody reads it.
    """
    with suppress(OSError, KVLeaseError):
        sock.shutdown(socket.SHUT_RDWR)
        reply, fds = receive_attached(sock, received)
        close_all(fds)
        return reply.attach.token
    return ""


def _chunk(sock: socket.socket, fds: list[int]) -> bytes:
    # socket.recv_fds drops its flags (Python 3.11), and without MSG_CMSG_CLOEXEC every program that the worker starts
    # would inherit the regions.
    ancillary_bytes = socket.CMSG_LEN(FDS_MAX * _BYTES_PER_FD)
    chunk, ancillary, flags, _ = sock.recvmsg(2**16, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += array("i", content[: len(content) - len(content) % _BYTES_PER_FD])
    if not chunk:
        raise ConnectionResetError
    if flags & socket.MSG_CTRUNC:
        message = "descriptors that came with the reply were lost; raise this process's limit on open files"
        raise UnavailableError(message, resource="fds", available=len(fds), limit=FDS_MAX)
    return chunk


def close_all(fds: list[int]) -> None:
    """Close descriptors that were received."""
    while fds:
        os.close(fds.pop())
