"""Own the demo's child processes: the daemon, the workers and the reference; what they are asked is in `scenes`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import BinaryIO

    from workload import Request

START_SECONDS_MAX: Final = 180.0
"""Importing torch takes most of it on a busy machine."""
ORDER_SECONDS_MAX: Final = 120.0
_HERE: Final = Path(__file__).parent
_LINE_BYTES_MAX: Final = 1 << 20


class Child:
    """One process, gone when its `async with` ends, or the demo is killed; its standard error goes to a file."""

    def __init__(self, name: str, command: Sequence[str], directory: Path) -> None:
        """Note what to start."""
        self.name = name
        self._command = command
        self._log_path = directory / f"{name}.log"
        self._log: BinaryIO | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The running process."""
        assert self._process is not None
        return self._process

    async def __aenter__(self) -> Self:
        """Start the process."""
        self._log = self._log_path.open("ab")
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(_HERE / "leash.py"), str(os.getpid())),
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            limit=_LINE_BYTES_MAX,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill the process if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        # Closed by hand, for the pipe outlives the process and asyncio would complain at exit.
        self.process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001
        assert self._log is not None
        self._log.close()

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON lines that the process writes."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            yield json.loads(line)

    async def write(self, **order: object) -> None:
        """Write one JSON line to the process."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        await self.process.stdin.drain()

    async def kill(self) -> float:
        """Kill the process as nothing can refuse; return the clock's seconds at that instant."""
        self.process.kill()
        killed_at = time.monotonic()
        await self.process.wait()
        return killed_at


class Daemon(Child):
    """`kvleased serve` with a directory of its own and no TCP port."""

    def __init__(self, directory: Path, device: str) -> None:
        """Note where the sockets go, and on which device the pools are."""
        self.device = device
        self.address = f"unix://{directory}/kvlease.sock"
        options = ["--runtime-dir", str(directory), "--no-listen-tcp", "--no-serve-grpc"]
        options += ["--device", device]
        super().__init__(
            "kvleased", [sys.executable, "-m", "kvleased", "serve", *options], directory
        )

    def kill_control(self) -> int:
        """Kill the control process, which the supervisor will replace; return its process id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            if b"control" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                return pid
        message = "the supervisor has no control process"
        raise RuntimeError(message)

    async def stop(self) -> int:
        """Ask the daemon to drain and stop; return its exit status."""
        self.process.terminate()
        async with asyncio.timeout(ORDER_SECONDS_MAX):
            return await self.process.wait()


class Reference(Child):
    """Plain Transformers over the same requests."""

    def __init__(self, directory: Path, device: str, *, is_quick: bool) -> None:
        """Note what to start."""
        options = ["--device", device, *(["--quick"] if is_quick else [])]
        super().__init__(
            "reference", [sys.executable, str(_HERE / "reference.py"), *options], directory
        )

    async def answers(self) -> dict[str, list[int]]:
        """Wait for the end and return the tokens that follow each prompt."""
        return {told["request_id"]: told["tokens"] async for told in self.lines()}


class Worker(Child):
    """One worker process and the events that it tells."""

    def __init__(
        self, name: str, daemon: Daemon, directory: Path, on_step: Callable[[], None]
    ) -> None:
        """Note what to start; `on_step` is called at every token."""
        command = [sys.executable, str(_HERE / "worker.py"), daemon.address, name, daemon.device]
        super().__init__(name, command, directory)
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._on_step = on_step
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start the process and listen to it."""
        await super().__aenter__()
        self._reader = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill the process if it still runs."""
        assert self._reader is not None
        self._reader.cancel()
        await super().__aexit__()

    async def expect(self, event: str, *, seconds_max: float = ORDER_SECONDS_MAX) -> dict[str, Any]:
        """Wait for the next event and return it; anything else, silence or death is an error."""
        async with asyncio.timeout(seconds_max):
            told = await self._events.get()
        if told["event"] != event:
            message = f"{self.name} said {told['event']!r} where {event!r} was due"
            raise RuntimeError(message)
        return told

    async def ready(self) -> dict[str, Any]:
        """Wait until the worker has built its model and attached."""
        return await self.expect("ready", seconds_max=START_SECONDS_MAX)

    async def begin(self, request: Request, *, hold_at: int | None = None) -> None:
        """Order a request; it is held after `hold_at` new tokens."""
        await self.write(
            do="generate",
            request_id=request.request_id,
            token_ids=request.token_ids,
            max_new_tokens=request.max_new_tokens,
            hold_at=hold_at,
        )

    async def order(self, do: str, *, answer: str) -> dict[str, Any]:
        """Give an order to a held request and wait for the answer."""
        await self.write(do=do)
        return await self.expect(answer)

    async def stop(self) -> int:
        """Let the worker detach and end; return its exit status."""
        await self.order("stop", answer="stopped")
        async with asyncio.timeout(ORDER_SECONDS_MAX):
            return await self.process.wait()

    async def _listen(self) -> None:
        async for told in self.lines():
            if told["event"] == "step":
                self._on_step()
            else:
                self._events.put_nowait(told)
        self._events.put_nowait({"event": "end"})
