"""Be a crowd of strangers on gRPC's port: hold many connections, and replace each one that ends.

`python -m tests.acceptance.crowd PORT CONNECTIONS` says READY once so many connections have been opened, goes on until
its input ends, and then prints how many it has opened. With `--tls` some of them begin a handshake.
"""

import asyncio
import resource
import ssl
import struct
import sys
from typing import Final

AT_ONCE: Final = 100
"""Connections opened at the same time."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""The beginning of a TLS handshake that is never finished."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack(">IBBI", len(payload), kind, flags, stream)[1:] + payload


def probe() -> bytes:
    """Return a call of the health service, which anybody may make."""
    head = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in {
            b":method": b"POST", b":scheme": b"http", b":path": b"/grpc.health.v1.Health/Check",
            b":authority": b"x", b"content-type": b"application/grpc", b"te": b"trailers",
        }.items()
    )  # fmt: skip
    return frame(1, 4, 1, head) + frame(0, 1, 1, bytes(5))


SAID: Final = (b"", PREFACE + frame(4, 0, 0), PREFACE + frame(4, 0, 0) + probe(), HELLO)
"""What each stranger sends: nothing, the start of HTTP/2, the same with a health call, or the start of TLS."""


class Crowd:
    """All the strangers."""

    def __init__(self, port: int, num_connections: int, tls: ssl.SSLContext | None) -> None:
        """Take the port, the number of connections, and the TLS context if there is one."""
        self._port = port
        self._num_connections = num_connections
        self._tls = tls
        self._door = asyncio.Semaphore(AT_ONCE)
        self.num_opened = 0
        self.is_full = asyncio.Event()

    async def be_one(self, number: int) -> None:
        """Hold a connection, and open another whenever it ends, for ever."""
        said = SAID[number % len(SAID)]
        tls = self._tls if said.startswith(PREFACE) else None
        while True:
            try:
                async with self._door:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=tls)
                self.num_opened += 1
                if self.num_opened >= self._num_connections:
                    self.is_full.set()
                writer.write(said)
                while await reader.read(1 << 16):
                    pass
                writer.close()
            except OSError:
                # The daemon hung up in the middle.
                await asyncio.sleep(0.01)


async def besiege(port: int, num_connections: int, *, is_tls: bool) -> int:
    """Be a crowd until standard input ends; return how many connections were opened."""
    tls = ssl.create_default_context() if is_tls else None
    if tls is not None:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        tls.set_alpn_protocols(["h2"])
    crowd = Crowd(port, num_connections, tls)
    strangers = [asyncio.create_task(crowd.be_one(number)) for number in range(num_connections)]
    await crowd.is_full.wait()
    print("READY", flush=True)  # noqa: T201 -- this is what is waited for
    await asyncio.to_thread(sys.stdin.read)
    for stranger in strangers:
        stranger.cancel()
    await asyncio.gather(*strangers, return_exceptions=True)
    return crowd.num_opened


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    besieging = besiege(int(sys.argv[1]), int(sys.argv[2]), is_tls="--tls" in sys.argv)
    print(asyncio.run(besieging))  # noqa: T201 -- the same
