"""Own a server that sits before a real one and does what networks and broken servers do."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum


class Fault(Enum):
    """What the server does with what it would have to say."""

    NONE = "passes it on"
    SLOW = "says everything, at some megabytes a second"
    DRIP = "says a byte now and then"
    HALF = "says half of it and closes"
    GARBAGE = "says something else"
    SILENCE = "says nothing"
    HUGE = "announces a value larger than the memory"
    LONG = "announces a list longer than the memory"


_CHUNK_BYTES = 1 << 16
_NOISE = bytes(range(1, 256)) * 40
_HUGE = b"$500000000000\r\n"
_LONG = b"*4000000000\r\n"
_SECONDS_A_BYTE = 0.02
_SLOW_BYTES_A_SECOND = 3 << 20


class FaultyServer:
    """Pass bytes between clients and a Unix socket, with the fault that is set at the moment."""

    def __init__(self, upstream: str) -> None:
        self.fault = Fault.NONE
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        """End every connection and every thread."""
        for sock in self._sockets:
            _end(sock)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _start(self, act: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=act))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                self._sockets += [client, server]
                server.connect(self._upstream)
                self._start(lambda here=client, there=server: self._pass(here, there, self._hear))  # type: ignore[misc]
                self._start(lambda here=client, there=server: self._pass(there, here, self._say))  # type: ignore[misc]

    @staticmethod
    def _pass(
        source: socket.socket, target: socket.socket, say: Callable[[socket.socket, bytes], None]
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                say(target, chunk)
        for sock in (source, target):
            _end(sock)

    def _hear(self, target: socket.socket, chunk: bytes) -> None:
        target.sendall(chunk)
        if self.fault is Fault.SLOW:
            time.sleep(len(chunk) / _SLOW_BYTES_A_SECOND)

    def _say(self, target: socket.socket, chunk: bytes) -> None:
        if self.fault is Fault.NONE:
            target.sendall(chunk)
        elif self.fault is Fault.SLOW:
            target.sendall(chunk)
            time.sleep(len(chunk) / _SLOW_BYTES_A_SECOND)
        elif self.fault is Fault.DRIP:
            for byte in chunk:
                target.sendall(bytes([byte]))
                time.sleep(_SECONDS_A_BYTE)
        elif self.fault is Fault.HALF:
            target.sendall(chunk[: (len(chunk) + 1) // 2])
            _end(target)
        elif self.fault is Fault.GARBAGE:
            target.sendall(_NOISE)
        elif self.fault is Fault.HUGE:
            target.sendall(_HUGE + chunk)
        elif self.fault is Fault.LONG:
            target.sendall(_LONG + chunk)


@contextlib.contextmanager
def faulty_server(upstream: str) -> Iterator[FaultyServer]:
    """Have one for a while."""
    server = FaultyServer(upstream)
    try:
        yield server
    finally:
        server.close()


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
