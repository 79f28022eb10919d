"""Own the daemon's view of the lower tiers: the links to all movers, and whether each tier works.

The movers' answers go to the cores as commands; what a core decides then is its own business.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import Final, Protocol

import structlog

from kvleased.caches import host_watch
from kvleased.caches.entries import CacheEntry
from kvleased.caches.registry import Registry
from kvleased.config.addresses import without_credentials
from kvleased.config.settings import Settings
from kvleased.core import commands as c
from kvleased.core.effects import MOVER_OF, Adopted, Copy, Direction, Mover, Probe, Tier
from kvleased.core.tier.labels import BYTES_PER_LABEL
from kvleased.movers import protocol
from kvleased.movers.batches import LinkFigures, ObserveCopies
from kvleased.movers.gpu.device_link import Allotment, DeviceLink
from kvleased.movers.link import MoverLink
from kvleased.movers.mover_limits import mover_limits
from kvleased.movers.mover_watch import MoverWatch
from kvleased.movers.protocol import Ask, Found, PoolMap, Purge, Purged, Status, Told
from kvleased.supervision.processes import DISK_MOVER, MOVER, REMOTE_MOVER

ROLES: Final[Mapping[Mover, str]] = {
    Mover.MEMORY: MOVER,
    Mover.DISK: DISK_MOVER,
    Mover.REMOTE: REMOTE_MOVER,
}
"""What the supervisor calls the process of each mover."""
TIERS: Final[Mapping[Mover, Tier]] = {Mover.DISK: Tier.DISK, Mover.REMOTE: Tier.REMOTE}
"""The tiers that do not work while their mover is away. The host pool goes on: only its copies wait."""
_CALLED_OFF: Final[Mapping[Mover, frozenset[Direction]]] = {
    Mover.MEMORY: frozenset(one for one, mover in MOVER_OF.items() if mover is Mover.MEMORY),
    Mover.DISK: frozenset({Direction.LOAD}),
}
"""The copies that somebody may wait for: while a mover hangs, those that it has not got yet are called off."""
_AWAY: Final = Status(is_on=False, reason="its mover is being started")
_UNPOPULATED: Final = Status(is_on=False, reason="the cache's memory is being populated")
_LOG = structlog.get_logger()


class Keeper(Protocol):
    """Ends and replaces processes: the link to the supervisor, as the tiers use it."""

    def recycle_mover(self, role: str, generation: int) -> None:
        """Have a mover killed and replaced."""


Apply = Callable[[CacheEntry, c.Command], object]
"""Gives the core of a cache a command, carries out the effects, and returns the core's reply."""


@dataclass(slots=True, eq=False)
class _Probing:
    """A probe under way, in one or more questions."""

    pool: int
    probe_id: int
    deadline: asyncio.TimerHandle
    told: dict[int, bytes | None] = field(default_factory=dict)
    """The answers by the number of their question, in the order of the questions; None as long as there is none."""


class Tiers:
    """Send copies and questions to the movers, and tell the cores what comes back."""

    def __init__(
        self,
        registry: Registry,
        apply: Apply,
        keeper: Keeper,
        settings: Settings,
        observe: ObserveCopies = lambda *_: None,
        note_store: Callable[[CacheEntry], None] = lambda _: None,
    ) -> None:
        """Make a link for each mover that the settings ask for."""
        self._note_store = note_store
        self._registry = registry
        self._apply = apply
        self._keeper = keeper
        self._probe_seconds = settings.remote_ms_max / 1000
        self._purge_seconds = settings.mover_seconds_max
        self._has_host_files = settings.host_dir is not None
        self._watches = {
            mover: MoverWatch(mover, settings.mover_seconds_max) for mover in _CALLED_OFF
        }
        self._purges: dict[int, asyncio.Future[str]] = {}
        """Purges under way, by pool: each brings the reason why the store could not be purged; empty if it was."""
        self._question = 0
        self._probes: dict[int, _Probing] = {}
        """The probes under way, by the number of each of their questions."""
        self.links = {
            mover: MoverLink(self, limits, mover, observe)
            for mover, limits in mover_limits(settings).items()
        }
        if settings.is_on_gpu:
            limits = mover_limits(settings)[Mover.MEMORY]
            self.links[Mover.MEMORY] = DeviceLink(self, limits, Mover.MEMORY, observe)
        self.mover_ends = dict.fromkeys((mover.value for mover in self.links), 0)
        """How many movers of each kind have ended in this life of the control process."""
        self._global: dict[Mover, Status] = dict.fromkeys(TIERS, _AWAY)
        self._by_pool: dict[tuple[Mover, int], Status] = {}

    def __repr__(self) -> str:
        """Show life: the links."""
        return f"<Tiers {', '.join(map(repr, self.links.values()))}>"

    @property
    def away(self) -> str:
        """The roles of the movers that are not attached at this moment, for people; empty if all are."""
        return ", ".join(ROLES[mover] for mover, link in self.links.items() if not link.is_attached)

    def figures(self, now: float) -> dict[str, LinkFigures]:
        """Return how much each mover has to do."""
        return {mover.value: link.figures(now) for mover, link in self.links.items()}

    def tick(self, now: float) -> None:
        """Give up what is overdue, and look for movers that hang and at the files of host pools."""
        for link in self.links.values():
            link.tick(now)
        for mover, watch in self._watches.items():
            if mover in self.links:
                self._watch(self.links[mover], watch, now)
        for entry in self._registry:
            if host_watch.look(entry, is_in_files=self._has_host_files):
                entry.stores[Tier.HOST] = host_watch.CUT_OFF
                self._apply(entry, c.TierChanged(tier=Tier.HOST, is_on=False))

    def _watch(self, link: MoverLink, watch: MoverWatch, now: float) -> None:
        """Let nobody wait for a mover that hangs, until it answers again; the copies that it has already got go on."""
        if watch.look(link, now):
            for entry in list(self._registry.by_pool.values()):
                if link.mover is Mover.MEMORY:
                    self._tell_of_host(entry)
                elif link.mover in self._stores_of(entry):
                    self._tell(entry, link.mover)
        if watch.is_hanging:
            link.fail_waiting(_CALLED_OFF[link.mover])

    def close(self) -> None:
        """Let go of the movers."""
        for probing in self._probes.values():
            probing.deadline.cancel()
        self._probes.clear()
        self._answer_purges("the daemon is stopping")
        for link in self.links.values():
            link.close()

    # Caches

    async def started(self) -> None:
        """Wait until caches can be made: until the GPU's mover has started; not at all where pools are CPU memory."""
        link = self.links[Mover.MEMORY]
        if isinstance(link, DeviceLink):
            await link.started()

    async def allocate(self, num_bytes: int) -> Allotment:
        """Have the GPU's mover allocate memory, whose descriptor the caller then owns; raises what the link raises."""
        link = self.links[Mover.MEMORY]
        assert isinstance(link, DeviceLink), "device pools are CPU memory"
        return await link.allocate(num_bytes)

    def map(self, entry: CacheEntry, pool: PoolMap, fds: Sequence[int]) -> None:
        """Have the movers that the cache needs map its pools."""
        for link in self._links_of(entry):
            link.map(pool, fds)

    def unmap(self, entry: CacheEntry) -> None:
        """Have the movers forget the pools of a cache."""
        for link in self._links_of(entry):
            link.unmap(entry.pool)
            self._by_pool.pop((link.mover, entry.pool), None)

    async def purge(self, entry: CacheEntry) -> str:
        """Have the file of a cache's disk store removed; return why it may still be there, or "" if it is gone."""
        status = entry.stores.get(Tier.DISK, _AWAY)
        if not status.is_on:
            return status.reason
        if not self.links[Mover.DISK].ask(Purge(pool=entry.pool)):
            return _AWAY.reason
        answer = self._purges.setdefault(entry.pool, asyncio.get_running_loop().create_future())
        await asyncio.wait((answer,), timeout=self._purge_seconds)
        late = f"its mover has not answered for {self._purge_seconds:g} s"
        return answer.result() if answer.done() else late

    def _answer_purges(self, reason: str, pool: int = 0) -> None:
        """Answer those who wait for the purge of a pool's store, or of all stores if `pool` is 0."""
        for one in [pool] if pool else list(self._purges):
            answer = self._purges.pop(one, None)
            if answer is not None and not answer.done():
                answer.set_result(reason)

    def introduce(self, entry: CacheEntry) -> None:
        """Tell the core of a cache that is new, or that has just got all of its memory, which of its tiers work."""
        if self._watches[Mover.MEMORY].is_hanging:
            self._tell_of_host(entry)
        for mover in self._stores_of(entry):
            self._tell(entry, mover)

    def _links_of(self, entry: CacheEntry) -> Iterable[MoverLink]:
        return [self.links[mover] for mover in (Mover.MEMORY, *self._stores_of(entry))]

    def _stores_of(self, entry: CacheEntry) -> Iterable[Mover]:
        return [mover for mover in TIERS if mover in self.links and entry.has_tier(TIERS[mover])]

    # Effects

    def send(self, entry: CacheEntry, copy: Copy) -> None:
        """Have the mover for a copy's direction carry it out."""
        link = self.links[MOVER_OF[copy.direction]]
        link.send(entry.pool, copy, with_checksums=entry.with_checksums)

    def probe(self, entry: CacheEntry, probe: Probe) -> None:
        """Ask the remote store which labels it has; of those behind its answers in time, nothing is known."""
        assert probe.labels, "a probe asks for something"
        packet_bytes = protocol.LABELS_A_PACKET_MAX * BYTES_PER_LABEL
        parts = [
            probe.labels[at : at + packet_bytes] for at in range(0, len(probe.labels), packet_bytes)
        ]
        loop = asyncio.get_running_loop()
        first = self._question + 1
        self._question += len(parts)
        numbers = range(first, first + len(parts))
        deadline = loop.call_later(self._probe_seconds, self._conclude, first)
        probing = _Probing(entry.pool, probe.probe_id, deadline, dict.fromkeys(numbers))
        self._probes |= dict.fromkeys(numbers, probing)
        link = self.links.get(Mover.REMOTE)
        for number, labels in zip(numbers, parts, strict=True):
            question = Ask(number=number, pool=entry.pool, labels=labels)
            if link is None or not link.ask(question):
                break
        else:
            return
        self._conclude(first)

    def _conclude(self, number: int) -> None:
        """Answer with what was told of the first labels, if anything was."""
        probing = self._probes.get(number)
        if probing is not None:
            self._answer(probing, b"".join(filter(None, takewhile(bool, probing.told.values()))))

    def _told(self, told: Told) -> None:
        probing = self._probes.get(told.number)
        if probing is None:
            return
        probing.told[told.number] = told.is_present
        if not told.is_present or None not in probing.told.values():
            self._conclude(told.number)

    def _answer(self, probing: _Probing, is_present: bytes) -> None:
        probing.deadline.cancel()
        for number in probing.told:
            self._probes.pop(number, None)
        entry = self._registry.by_pool.get(probing.pool)
        if entry is not None:
            self._apply(entry, c.Probed(probe_id=probing.probe_id, is_present=is_present))

    # From the links

    def answer_copy(self, pool: int, command: c.CopyDone | c.CopyFailed | c.CopyLost) -> None:
        """Tell the core of a cache what became of a copy; a cache that was deleted meanwhile needs no answer."""
        entry = self._registry.by_pool.get(pool)
        if entry is not None:
            self._apply(entry, command)

    def answer_mover_death(self, command: c.MoverDied) -> None:
        """Tell every core that the dead mover writes none of its copies any more."""
        for entry in list(self._registry.by_pool.values()):
            self._apply(entry, command)

    def recycle_mover(self, mover: Mover, generation: int) -> None:
        """Have a mover replaced."""
        self._keeper.recycle_mover(ROLES[mover], generation)

    def hear(self, mover: Mover, said: Told | Found | Purged | Status) -> None:
        """Take a message of a store's mover."""
        if isinstance(said, Told):
            self._told(said)
        elif isinstance(said, Found):
            self._adopt(mover, said)
        elif isinstance(said, Purged):
            self._answer_purges(said.reason, said.pool)
        else:
            # The message of a client library may repeat the address that it was given.
            status = replace(said, reason=without_credentials(said.reason))
            _LOG.info("store_status", tier=mover.value, **asdict(status))
            self._note(mover, status)

    def mover_went(self, mover: Mover) -> None:
        """Take note that a mover has gone: its tier is off until the next mover says that it works."""
        if mover is Mover.REMOTE:
            for probing in dict.fromkeys(self._probes.values()):
                self._answer(probing, b"")
        if mover is Mover.DISK:
            self._answer_purges("its mover has ended")
        if mover in TIERS:
            self._note(mover, _AWAY)

    def _adopt(self, mover: Mover, found: Found) -> None:
        entry = self._registry.by_pool.get(found.pool)
        if entry is None:
            return
        if found.slot_ids:
            adopt = c.Adopt(slot_ids=found.slot_ids, labels=found.labels, checksums=found.checksums)
            reply = self._apply(entry, adopt)
            assert isinstance(reply, Adopted), "an Adopt is answered so"
            entry.num_found[Tier.DISK] += reply.num_adopted
        if found.is_last:
            entry.is_scanned = True
            self.links[mover].note_file(found.pool, entry.disk_file_id)
            self._note_store(entry)
            if entry.stores.get(Tier.DISK, _AWAY).is_on:
                self._apply(entry, c.TierChanged(tier=Tier.DISK, is_on=True))
            _LOG.info("store_scanned", cache=entry.name, num_found=entry.num_found[Tier.DISK])

    def _note(self, mover: Mover, status: Status) -> None:
        """Remember the latest status of a store, and tell it to the cores for which it is new."""
        if status.pool:
            self._by_pool[mover, status.pool] = status
        else:
            self._global[mover] = status
            for known in [known for known in self._by_pool if known[0] is mover]:
                del self._by_pool[known]
        for entry in list(self._registry.by_pool.values()):
            if status.pool in {0, entry.pool} and mover in self._stores_of(entry):
                self._tell(entry, mover)

    def _tell(self, entry: CacheEntry, mover: Mover) -> None:
        status = self._by_pool.get((mover, entry.pool), self._global[mover])
        is_other = status.is_on and status.file_id != entry.disk_file_id and mover is Mover.DISK
        is_hanging = mover is Mover.DISK and self._watches[mover].is_hanging
        if is_hanging and status.is_on and not is_other:
            # If there is another file, the core must be told so before it is told of that file's slots.
            status = self._watches[mover].status
        if status.is_on and not entry.is_ready and not is_other:
            # The mover does not map the cache's pools yet, and would refuse every copy.
            status = _UNPOPULATED
        before = entry.stores.get(TIERS[mover])
        entry.stores[TIERS[mover]] = replace(status, pool=0)
        if is_other or before is None or before.is_on != status.is_on:
            changed = c.TierChanged(
                tier=TIERS[mover],
                is_on=status.is_on,
                is_empty=is_other,
                is_mover_away=status in (_AWAY, _UNPOPULATED),
                is_read=not (status.is_on and mover is Mover.DISK)
                or (entry.is_scanned and not is_other),
            )
            self._apply(entry, changed)
        if is_other:
            self._begin_file(entry, status.file_id)

    def _tell_of_host(self, entry: CacheEntry) -> None:
        """Tell the core of a cache whether it may rely on copies from and to the host pool; the bytes stay there."""
        if not entry.has_tier(Tier.HOST) or host_watch.is_cut_off(entry):
            return
        watch = self._watches[Mover.MEMORY]
        entry.stores[Tier.HOST] = watch.status if watch.is_hanging else Status(is_on=True)
        self._apply(entry, c.TierChanged(tier=Tier.HOST, is_on=not watch.is_hanging))

    def _begin_file(self, entry: CacheEntry, file_id: str) -> None:
        """Take note that the disk store of a cache is a new file; the core has just forgotten the old one.

        The note comes after the forgetting: if this process is killed in between, the next one forgets once more.
        """
        entry.disk_file_id, entry.is_scanned = file_id, False
        entry.num_found[Tier.DISK] = 0
        self.links[Mover.DISK].note_file(entry.pool, "")
        self._note_store(entry)

    # From the supervisor

    def mover_came(self, role: str, sock: socket.socket, generation: int) -> None:
        """Take the socket of a new mover."""
        link = self._link_of(role)
        link.attach(sock, generation)
        _LOG.info("mover_attached", mover=link.mover.value, generation=generation)

    def mover_died(self, role: str, generation: int) -> None:
        """Take note that a mover is proven dead."""
        link = self._link_of(role)
        self.mover_ends[link.mover.value] += 1
        _LOG.warning(
            "mover_died",
            mover=link.mover.value,
            generation=generation,
            batches=link.batches_in_flight,
        )
        link.died(generation)

    def _link_of(self, role: str) -> MoverLink:
        return next(link for mover, link in self.links.items() if ROLES[mover] == role)
