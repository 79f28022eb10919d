"""A daemon in this process: a real store on one thread, a real mover on another, no supervisor and no transports."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.config.settings import Settings
from kvleased.core.effects import Mover
from kvleased.daemon import Daemon
from kvleased.movers.engine import Engine
from kvleased.supervision import keeper
from kvleased.supervision.keeper import Store
from kvleased.supervision.keeper_link import KeeperLink

TOKENS_PER_BLOCK = 4
OPERATOR = Caller(transport="local")


def inputs(**changes: Any) -> pb.PlanInputs:
    """Return inputs of a cache of 16 blocks of 4 tokens and 8 slots, but for the changes."""
    layer = pb.LayerSpec(
        name="0", kind="full_attention", num_kv_heads=1, head_size=16, dtype="float32"
    )
    settled: dict[str, Any] = {
        "layers": [layer],
        "tokens_per_block": TOKENS_PER_BLOCK,
        "device_blocks": 16,
        "host_bytes": 8 * 512,
    }
    return pb.PlanInputs(**(settled | changes))


def keys(first: int, count: int) -> bytes:
    """Return packed block keys, starting with key number `first`."""
    return b"".join(number.to_bytes(32, "little") for number in range(first, first + count))


class Node:
    """Hold what a supervisor keeps between the lives of a daemon, and the daemon that lives now."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = Store()
        self.epoch = 1_000
        self.daemon: Daemon
        self._mover: socket.socket | None = None

    @asynccontextmanager
    async def life(self) -> AsyncIterator[Daemon]:
        """Start the next daemon over what is kept; at the end it goes without telling anybody."""
        self.epoch += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keeper_thread = threading.Thread(target=self._keep, args=(ours,), daemon=True)
        keeper_thread.start()
        link = KeeperLink(theirs)
        epoch, kept, notes = link.take_over()
        self.daemon = Daemon(self.settings, link, epoch)
        await self.daemon.start(kept, notes)
        self.daemon.serve()
        async with asyncio.timeout(10):
            while not self.daemon.tiers.links[Mover.MEMORY].is_attached:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0)
        try:
            yield self.daemon
        finally:
            await self.daemon.stop()
            await asyncio.to_thread(keeper_thread.join, 10)
            for entry in self.daemon.registry:
                entry.close()

    async def ask(self, verb: str, request: Message, caller: Caller = OPERATOR) -> Any:
        """Make a call, and wait where the daemon has the caller wait."""
        answer = self.daemon.call(verb, request, caller)
        return await answer if isinstance(answer, asyncio.Future) else answer

    async def register(
        self, cache: str = "main", options: pb.CacheOptions | None = None, **changes: Any
    ) -> pb.CacheInfo:
        """Register a cache and wait until its memory is there."""
        await self.ask(
            "register_cache",
            pb.RegisterCacheRequest(cache=cache, inputs=inputs(**changes), options=options),
        )
        async with asyncio.timeout(10):
            while self.daemon.registry.cache(cache).status != "ready":  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0)
        return self.daemon.registry.cache(cache).info()

    async def attach(self, cache: str = "main", **changes: Any) -> Caller:
        """Attach a worker that cannot prove its death, and return it as a caller."""
        reply = await self.ask(
            "attach", pb.AttachRequest(cache=cache, **changes), Caller(transport="rest")
        )
        return Caller(transport="rest", token=reply.token)

    async def until_kept(self, count: int) -> None:
        """Wait until `count` things are kept: the supervisor does not answer keep and drop messages."""
        async with asyncio.timeout(10):
            while len(self.store) != count:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0.001)

    @property
    def noted(self) -> list[str]:
        """The names of what is kept without a descriptor."""
        entries = [entry for message, _ in self.store.handover() for entry in message["entries"]]
        return [entry["name"] for entry in entries if not entry["has_descriptor"]]

    def _keep(self, link: socket.socket) -> None:
        mover_end, daemon_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mover = threading.Thread(target=_move, args=(mover_end,), daemon=True)
        mover.start()
        hello = {"op": "hello", "epoch": self.epoch, "num_kept": len(self.store)}
        outgoing = [(hello, []), *self.store.handover()]
        outgoing.append(({"op": "mover", "role": "mover", "generation": 1}, [daemon_end.fileno()]))
        with link, daemon_end:
            while True:
                for message, fds in outgoing:
                    socket.send_fds(link, [keeper.encode(message)], fds)
                try:
                    received = keeper.receive(link)
                except ConnectionResetError:
                    break
                if received is None:
                    break
                outgoing = self.store.act(*received) if received[0]["op"] != "ready" else []
        mover.join(10)


def _move(link: socket.socket) -> None:
    with link:
        Engine(link).run()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a small daemon."""
    return Settings(runtime_dir=tmp_path, max_leases=8, memory_bytes_max=1 << 30)


@pytest.fixture
def node(settings: Settings) -> Any:
    """A node whose daemon is not started yet."""
    node = Node(settings)
    yield node
    node.store.close()
