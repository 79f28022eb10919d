"""Own the process between the pools of a node and a remote store; the store's address says of which kind it is.

Nothing that the store does or fails to do ends the process: each packet is answered within its time budget, with misses
if necessary. Only a call of a store's library that never ends costs the process, and then the supervisor starts it
again.
"""

import json
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, NoReturn

from kvleased.config.addresses import RemoteUrl, RemoteUrlError
from kvleased.core.effects import Direction
from kvleased.movers import protocol
from kvleased.movers.engine import NO_POOLS, Engine, Lay, lay_for_store, lay_in_memory, tell_refused
from kvleased.movers.pools import OutOfBoundsError
from kvleased.movers.protocol import Ask, Batch, Completion, PoolMap, Status, Told
from kvleased.movers.remote.bounded import Bounded, StuckError
from kvleased.movers.remote.breaker import Breaker
from kvleased.movers.remote.caller import IDLE_SECONDS, RemoteCaller
from kvleased.movers.remote.copies import RemoteBatch, RemoteCopies
from kvleased.movers.remote.store import RemoteError, RemoteStore
from kvleased.movers.remote.value import ValueForm, blocks_of
from kvleased.system.descriptors import receive_packet
from kvleased.telemetry import logs, streams

EX_UNAVAILABLE: Final = 69
_MS_BETWEEN_LOOKS: Final = 1_000
"""Milliseconds after which an idle process checks whether a call hangs for good."""
_PACKETS_A_TURN: Final = 64


class RemoteEngine(Engine):
    """Serve one link: answer questions and fetches as they come, and make shares step by step in between."""

    def __init__(
        self,
        link: socket.socket,
        store: Bounded,
        *,
        seconds_max: float,
        breaker: Breaker | None = None,
        idle_seconds: float = IDLE_SECONDS,
        lay: Lay = lay_in_memory,
    ) -> None:
        """Assign; `seconds_max` is the time budget of each packet."""
        super().__init__(link, lay)
        self._seconds_max = seconds_max
        self._caller = RemoteCaller(
            store,
            self._tell,
            seconds_max=seconds_max,
            breaker=breaker or Breaker(),
            idle_seconds=idle_seconds,
        )
        self._copies = RemoteCopies(self._caller, seconds_max=seconds_max)
        self._fingerprints: dict[int, str] = {}
        self._urgent: deque[Ask | Batch] = deque()
        self._shares: deque[RemoteBatch] = deque()
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)

    def __repr__(self) -> str:
        """Show how many caches there are, and the breaker."""
        return f"<RemoteEngine {len(self._pools)} caches, {self._caller!r}>"

    def _serve(self) -> None:
        while self._hear():
            self._caller.check()
            if self._urgent:
                self._answer(self._urgent.popleft())
            elif self._copies.has_spoiled:
                self._copies.drop_spoiled()
            elif self._shares:
                self._share_on()
            elif self._pools and self._caller.seconds_to_ping == 0:
                self._caller.ping()

    def _hear(self) -> bool:
        """Take in the packets that wait, or wait for one if there is nothing to do; return false at the link's end."""
        for _ in range(_PACKETS_A_TURN):
            if not self._poll.poll(self._ms_to_wait()):
                return True
            packet, fds = receive_packet(
                self._link, protocol.PACKET_BYTES_MAX, protocol.FDS_A_PACKET
            )
            if not packet:
                return False
            self._act(packet, fds)
        return True

    def _ms_to_wait(self) -> int:
        if self._urgent or self._shares or self._copies.has_spoiled:
            return 0
        if not self._pools:
            return _MS_BETWEEN_LOOKS
        seconds = self._caller.seconds_to_ping
        # Rounded up, so that the process does not wake in vain just before.
        return min(_MS_BETWEEN_LOOKS, int(seconds * 1e3) + (seconds > 0))

    def _act(self, packet: bytes, fds: list[int]) -> None:
        """Queue packets that take time; carry out those that only change the mapping at once."""
        kind = packet[:1]
        if kind == protocol.ASK:
            self._urgent.append(Ask.decode(packet))
        elif kind == protocol.BATCH:
            self._take(Batch.decode(packet))
        elif kind == protocol.UNMAP:
            self._finish()
            super()._act(packet, fds)
            self._fingerprints.pop(protocol.decode_unmap(packet), None)
        else:
            super()._act(packet, fds)

    def _map(self, message: PoolMap, fds: list[int]) -> None:
        super()._map(message, fds)
        self._fingerprints[message.pool] = message.layout_fingerprint

    def _take(self, batch: Batch) -> None:
        if batch.direction is Direction.SHARE:
            self._begin(batch)
        else:
            self._urgent.append(batch)

    def _finish(self) -> None:
        """Finish everything that was sent before."""
        while self._urgent:
            self._answer(self._urgent.popleft())
        while self._shares:
            self._share_on()

    def _answer(self, packet: Ask | Batch) -> None:
        if isinstance(packet, Ask):
            told = Told(number=packet.number, is_present=self._is_present(packet))
            self._link.sendall(told.encode())
        elif (work := self._work(packet)) is not None:
            while self._copies.step(work):
                pass
            self._link.sendall(work.completion.encode())

    def _is_present(self, ask: Ask) -> bytes:
        """Return which of some blocks the store has; empty if nobody knows.

        It also has those whose values are spoiled: the fetch that meets them counts them and has them dropped.
        """
        form = self._form(ask.pool)
        if form is None:
            return b""
        names = [form.name(block) for block in blocks_of(ask.labels)]
        value_bytes = form.value_bytes
        try:
            found = self._caller.call(
                lambda store: store.exists(names, value_bytes), self._seconds_max
            )
        except RemoteError:
            return b""
        return bytes(map(bool, found))

    def _begin(self, batch: Batch) -> None:
        if (work := self._work(batch)) is not None:
            self._shares.append(work)

    def _share_on(self) -> None:
        work = self._shares[0]
        if not self._copies.step(work):
            self._shares.popleft()
            self._link.sendall(work.completion.encode())

    def _work(self, batch: Batch) -> RemoteBatch | None:
        """Return a batch with everything that is needed to carry it out; refuse one that is out of bounds at once."""
        pools = self._pools.get(batch.pool, NO_POOLS)
        try:
            return RemoteBatch.of(batch, pools, self._form(batch.pool), self._seconds_max)
        except OutOfBoundsError as error:
            tell_refused(batch, str(error))
            self._link.sendall(Completion(number=batch.number, is_done=False).encode())
            return None

    def _form(self, pool: int) -> ValueForm | None:
        pools = self._pools.get(pool, NO_POOLS)
        return ValueForm.of(self._fingerprints.get(pool, ""), pools.image_bytes)

    def _tell(self, status: Status) -> None:
        self._link.sendall(status.encode())


def store_opener(url: str, *, ttl_seconds: int, seconds_max: float) -> Callable[[], RemoteStore]:
    """Return a function that opens the store at a URL, or says why it cannot; slow imports are made now."""
    try:
        parsed = RemoteUrl.parse(url)
    except RemoteUrlError as error:
        reason = f"remote_url: {error}"
        return lambda: _refuse(reason)
    if parsed.scheme == "mooncake":
        from kvleased.movers.remote.mooncake_store import MooncakeStore  # noqa: PLC0415 - one of two is needed

        return lambda: MooncakeStore.opened(parsed)
    from kvleased.movers.remote.redis_store import RedisStore  # noqa: PLC0415 - the same

    return lambda: RedisStore(parsed, ttl_seconds=ttl_seconds, seconds_max=seconds_max)


def main(link_fd: int, settings_fd: int) -> None:
    """Run a remote mover over inherited descriptors."""
    # A terminal sends its signals to all processes, but only the supervisor may end a mover.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(os.pread(settings_fd, os.fstat(settings_fd).st_size, 0))
    seconds_max = settings["remote_ms_max"] / 1e3
    store = Bounded(
        store_opener(
            settings["remote_url"],
            ttl_seconds=settings["remote_ttl_seconds"],
            seconds_max=seconds_max,
        )
    )
    with socket.socket(fileno=link_fd) as link:
        link.setblocking(True)
        try:
            lay = lay_for_store(settings_fd)
            RemoteEngine(link, store, seconds_max=seconds_max, lay=lay).run()
        except StuckError as error:
            logs.line("error", "remote_mover_ends", reason=str(error))
            # The hanging thread would also keep the interpreter from ending.
            streams.drain()
            os._exit(EX_UNAVAILABLE)
    store.close()


def _refuse(reason: str) -> NoReturn:
    raise RemoteError(reason)
