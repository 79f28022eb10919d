"""Be hostile to a daemon: send garbage, huge, slow and half-open requests to all listeners; count outcomes.

`python -m tests.deploy.hostile RUNTIME_DIR HTTP_PORT GRPC_PORT REQUESTS PER_SECOND` prints a line of JSON at its end.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
PATIENCE_SECONDS: Final = 8.0
"""Seconds that a hostile peer waits for the daemon to hang up."""
AT_ONCE: Final = 300
"""Most connections at once."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""The beginning of HTTP/2: its preface and empty settings."""


class Foe:
    """A hostile peer with many kinds of bad requests."""

    def __init__(self, runtime_dir: Path, http_port: int, grpc_port: int, seed: int = 0) -> None:
        """Find the listeners; as this user's process it can reach all of them."""
        self._dir = runtime_dir
        self._ports = {"http": http_port, "grpc": grpc_port}
        self._random = random.Random(seed)  # noqa: S311 -- it is to be the same each time
        self._reader, self._joiner = (
            (runtime_dir / f"{role}.token").read_text().strip() for role in ("reader", "joiner")
        )
        self.kinds: tuple[Callable[[], Awaitable[str]], ...] = (
            self.garbage_http, self.garbage_grpc, self.garbage_frame, self.huge_head, self.huge_body,
            self.huge_frame, self.deep_json, self.wrong_token, self.half_open_http, self.half_open_grpc,
            self.half_open_local, self.slow_head, self.slow_body, self.slow_frame, self.unread, self.odd_frames,
            self.flood_of_settings, self.rude_end,
        )  # fmt: skip

    async def garbage_http(self) -> str:
        """Send bytes that are no HTTP."""
        return await self._say("http", self._bytes(400))

    async def garbage_grpc(self) -> str:
        """Send bytes that are no frames behind the beginning of HTTP/2."""
        return await self._say("grpc", PREFACE + self._bytes(400))

    async def garbage_frame(self) -> str:
        """Send a frame that is no call to the local socket."""
        return await self._say(
            "kvlease.sock", (64).to_bytes(4, "little") + self._bytes(64), is_asking=True
        )

    async def huge_head(self) -> str:
        """Send a head that does not end."""
        return await self._say(
            "http", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (256 << 10)
        )

    async def huge_body(self) -> str:
        """Send a body far above the limit, as a caller who may send bodies."""
        return await self._say("http", self._post(self._joiner, 1 << 40) + b" " * (2 * MIB))

    async def huge_frame(self) -> str:
        """Send a frame that claims the greatest length."""
        return await self._say("kvlease.sock", b"\xff\xff\xff\xff" + bytes(64 << 10))

    async def deep_json(self) -> str:
        """Send deeply nested JSON."""
        body = b"[" * (512 << 10)
        return await self._say("http", self._post(self._joiner, len(body)) + body, is_asking=True)

    async def wrong_token(self) -> str:
        """Send a guessed token."""
        guess = self._bytes(16).hex()
        return await self._say("http", self._post(guess, 2) + b"{}", is_asking=True)

    async def half_open_http(self) -> str:
        """Send REST nothing at all."""
        return await self._say("http", b"")

    async def half_open_grpc(self) -> str:
        """Send gRPC nothing at all."""
        return await self._say("grpc", b"")

    async def half_open_local(self) -> str:
        """Send the local socket nothing at all."""
        return await self._say("kvlease.sock", b"")

    async def slow_head(self) -> str:
        """Send a head, a byte at a time."""
        return await self._say("http", b"GET /livez HTTP/1.1\r\nX: ", drip=b"x")

    async def slow_body(self) -> str:
        """Send a body, a byte at a time."""
        return await self._say("http", self._post(self._joiner, 4096), drip=b" ")

    async def slow_frame(self) -> str:
        """Send a frame, a byte at a time."""
        return await self._say("kvlease.sock", (4096).to_bytes(4, "little"), drip=b"\0")

    async def unread(self) -> str:
        """Send many requests with long answers, and read none."""
        ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        return await self._say("http", ask * 16, reads=False)

    async def odd_frames(self) -> str:
        """Send many empty frames."""
        return await self._say("kvlease.sock", bytes(4) * 1000, is_asking=True)

    async def flood_of_settings(self) -> str:
        """Send a thousand settings frames of HTTP/2."""
        return await self._say("grpc", PREFACE + (bytes(3) + b"\x04" + bytes(5)) * 1000)

    async def rude_end(self) -> str:
        """Send a request, and hang up before the answer."""
        _, writer = await self._open("http")
        writer.write(b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n\r\n")
        writer.transport.abort()
        return "left"

    def _post(self, token: str, num_bytes: int) -> bytes:
        head = f"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
        return head.encode()

    def _bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    async def _open(self, door: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if door in self._ports:
            return await asyncio.open_connection("127.0.0.1", self._ports[door])
        return await asyncio.open_unix_connection(self._dir / door)

    async def _say(
        self,
        door: str,
        said: bytes,
        *,
        drip: bytes = b"",
        reads: bool = True,
        is_asking: bool = False,
    ) -> str:
        """Send bytes, then drip more or wait, until the daemon hangs up or the patience ends."""
        reader, writer = await self._open(door)
        begun = time.monotonic()
        try:
            writer.write(said)
            if is_asking:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    return "answered" if await reader.read(64) else "closed"
            while time.monotonic() - begun < PATIENCE_SECONDS:
                if drip:
                    writer.write(drip)
                if writer.transport.is_closing() or (reads and reader.at_eof()):
                    return "closed"
                if reads:
                    try:
                        async with asyncio.timeout(0.1):
                            await reader.read(4096)
                    except TimeoutError:
                        continue
                else:
                    await asyncio.sleep(0.1)
            if not reads and await self._is_over(reader):
                return "closed"
        except (ConnectionError, TimeoutError) as error:
            return "patient" if isinstance(error, TimeoutError) else "closed"
        finally:
            writer.transport.abort()
        return "patient"

    @staticmethod
    async def _is_over(reader: asyncio.StreamReader) -> bool:
        """Tell whether nothing comes after the unread bytes."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await reader.read(MIB):
                    pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True


async def attack(foe: Foe, num_requests: int, per_second: float) -> dict[str, dict[str, int]]:
    """Send so many hostile requests at an even pace; return the outcomes by kind."""
    outcomes: dict[str, Counter[str]] = {kind.__name__: Counter() for kind in foe.kinds}
    room = asyncio.Semaphore(AT_ONCE)

    async def one(kind: Callable[[], Awaitable[str]]) -> None:
        async with room:
            try:
                outcomes[kind.__name__][await kind()] += 1
            except OSError:
                outcomes[kind.__name__]["turned away"] += 1

    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(num_requests):
            group.create_task(one(foe.kinds[number % len(foe.kinds)]))
            await asyncio.sleep(max(0.0, begun + number / per_second - time.monotonic()))
    return {name: dict(counts) for name, counts in outcomes.items()}


if __name__ == "__main__":
    found = asyncio.run(
        attack(
            Foe(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])),
            int(sys.argv[4]),
            float(sys.argv[5]),
        )
    )
    print(json.dumps(found))  # noqa: T201 -- this is what it is for
