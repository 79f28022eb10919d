"""Own the notes of a cache's requests, for its ghosts, and for traces while somebody records one.

The notes have no tokens, and keys leave this process only as digests, keyed by a secret of each recording.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from blake3 import blake3

from kvlease.errors import BusyError, KVLeaseError
from kvlease.ids import BYTES_PER_KEY
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.core import commands as c
from kvleased.core import effects as e
from kvleased.core.cache import Cache
from kvleased.core.magazine_replies import Exchanged
from kvleased.core.prefix.chains import are_distinct
from kvleased.core.state import split_keys
from kvleased.core.verbs.exchanging import NOT_HELD
from kvleased.traces.ghosts import Ghosts

WATCHERS_MAX: Final = 4
"""Recordings of one cache at once."""
KEYS_QUEUED_MAX: Final = 1 << 18
"""Keys of the requests that wait for the reader of one recording."""
REQUESTS_QUEUED_MAX: Final = 1 << 13
"""Requests that wait for the reader of one recording."""

_BYTES_PER_SECRET: Final = 32
_BYTES_PER_DIGEST: Final = 8
_KEYS_AT_ONCE: Final = 512
"""Keys that are digested in one go, before other callers have their turn."""
_COMMIT: Final = int(pb.STEP_VERB_COMMIT)
_EXTEND: Final = int(pb.STEP_VERB_EXTEND)
_RELEASE: Final = int(pb.STEP_VERB_RELEASE)


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request whose lease lives."""

    granted_at: float
    keys: bytes
    input_tokens: int
    hit_tokens: int
    last_token: int = 0
    """How far the lease was extended or committed."""


class Observer:
    """The notes of one cache's requests; while nobody wants them, they cost nothing."""

    def __init__(self, core: Cache, tokens_per_key: int, ghosts: Ghosts | None = None) -> None:
        """Take the core of the cache that is observed, and its ghosts if it has any."""
        self.ghosts = ghosts
        self._core = core
        self._tokens_per_key = tokens_per_key
        self._recordings: list[_Recording] = []
        self._requests: dict[int, _Request] = {}
        self._end_of_cache: KVLeaseError | None = None
        self._offered: set[int] = set()
        """The live leases whose keys the ghosts have, so that a reserve that is sent again counts once."""

    def __repr__(self) -> str:
        """Show life: who records and how many requests live."""
        return f"<Observer {len(self._recordings)} recordings, {len(self._requests)} requests>"

    @property
    def is_idle(self) -> bool:
        """Whether there are neither ghosts nor recordings."""
        return self.ghosts is None and not self._recordings

    def saw(self, command: c.Command, reply: object, now: float) -> None:
        """Note a command and its reply; `now` is in monotonic seconds."""
        if isinstance(reply, e.Reserved):
            if isinstance(command, c.Reserve):
                self._granted(command, reply, now)
        elif isinstance(reply, e.Stepped):
            assert isinstance(command, c.Step), "only a step is answered so"
            self._stepped(command, reply, now)
        elif isinstance(reply, Exchanged):
            assert isinstance(command, c.Exchange), "only an exchange is answered so"
            if command.hold_keys:
                self._held(command, reply, now)
            if command.missed_keys:
                self._missed(command.missed_keys, now)
        elif self._requests:
            if isinstance(command, c.Commit | c.Extend):
                self._went_on(command.lease_id, command.num_tokens)
            elif isinstance(command, c.Release):
                self._end([command.lease_id])

    def tick(self) -> None:
        """Note the leases that have ended without a call of their worker."""
        if self._offered:
            self._offered = set(filter(self._core.has_lease, self._offered))
        if self._requests:
            self._end(list(self._requests))

    def close(self, end_of_cache: KVLeaseError) -> None:
        """End all recordings: each is told what is not told yet, and then why there is no more."""
        self.tick()
        self._end_of_cache = end_of_cache
        for recording in self._recordings:
            recording.wake()

    def record(self, now: float) -> AsyncGenerator[pb.TraceResponse, None]:
        """Return the requests that are granted from now on, each when its lease has ended.

        The first message has no request: it only tells how many tokens a key covers. The last one is followed by why
        the cache has ended.

        Raises:
            BusyError: there are as many recordings as are allowed.
        """
        if len(self._recordings) >= WATCHERS_MAX:
            message = f"{len(self._recordings)} traces of this cache are being recorded already, the most allowed"
            raise BusyError(message, resource="traces", need=1, available=0, limit=WATCHERS_MAX)
        return self._follow(_Recording(began_at=now, tokens_per_key=self._tokens_per_key))

    async def _follow(self, recording: "_Recording") -> AsyncGenerator[pb.TraceResponse, None]:
        self._recordings.append(recording)
        try:
            yield pb.TraceResponse(tokens_per_key=self._tokens_per_key)
            while True:
                while not recording.has_next:
                    if self._end_of_cache is not None:
                        raise self._end_of_cache
                    await recording.wait()
                yield await recording.told(recording.next())
        finally:
            self._recordings.remove(recording)
            if not self._recordings:
                self._requests.clear()

    def _granted(self, command: c.Reserve, reply: e.Reserved, now: float) -> None:
        if not command.keys or reply.joined_id:
            # A rank that joins a lease asks for keys that the first rank has asked for already.
            return
        if self.ghosts is not None and reply.lease_id not in self._offered:
            self._offered.add(reply.lease_id)
            self.ghosts.offer(command.keys)
        if self._recordings and reply.lease_id not in self._requests:
            num_keys = len(command.keys) // BYTES_PER_KEY
            self._requests[reply.lease_id] = _Request(
                granted_at=now,
                keys=command.keys,
                input_tokens=min(num_keys * self._tokens_per_key, command.num_tokens),
                hit_tokens=reply.device_hit_tokens
                + reply.host_hit_tokens
                + reply.disk_hit_tokens
                + reply.remote_hit_tokens,
            )

    def _held(self, command: c.Exchange, reply: Exchanged, now: float) -> None:
        """Note the keys that an exchange asked to hold as a request that has ended, as its end will not be told.

        A key that is cached but was not held is left out: it is asked for again, and counts then. A key that is named
        twice counts once.
        """
        blocks = np.frombuffer(reply.held_blocks, "<i4")
        is_told = blocks != NOT_HELD
        keys = command.hold_keys
        if not are_distinct(keys):
            is_first = np.zeros(len(blocks), np.bool_)
            is_first[np.unique(np.frombuffer(keys, f"V{BYTES_PER_KEY}"), return_index=True)[1]] = (
                True
            )
            is_told &= is_first
        if not is_told.all():
            keys = np.frombuffer(keys, f"V{BYTES_PER_KEY}")[is_told].tobytes()
        if not keys:
            return
        if self.ghosts is not None:
            self.ghosts.offer(keys)
        if self._recordings:
            is_hit = blocks[is_told] >= 0
            num_hits = len(is_hit) if is_hit.all() else int(is_hit.argmin())
            request = _Request(
                granted_at=now,
                keys=keys,
                input_tokens=len(is_hit) * self._tokens_per_key,
                hit_tokens=num_hits * self._tokens_per_key,
            )
            for recording in self._recordings:
                recording.add(request)

    def _missed(self, keys: bytes, now: float) -> None:
        """Note keys that an exchange reports as missed: requests that found nothing, and that were made earlier."""
        for asked in _parted(keys):
            if self.ghosts is not None:
                self.ghosts.offer(asked)
            if self._recordings:
                num_tokens = len(asked) // BYTES_PER_KEY * self._tokens_per_key
                request = _Request(
                    granted_at=now, keys=asked, input_tokens=num_tokens, hit_tokens=0
                )
                for recording in self._recordings:
                    recording.add(request)

    def _stepped(self, command: c.Step, reply: e.Stepped, now: float) -> None:
        if self._requests and command.verbs:
            verbs = np.frombuffer(command.verbs, np.uint8)
            is_done = np.frombuffer(reply.codes, "<i4") == 0
            lease_ids = np.frombuffer(command.lease_ids, "<i8")
            num_tokens = np.frombuffer(command.num_tokens, "<i4")
            went_on = is_done & ((verbs == _EXTEND) | (verbs == _COMMIT))
            for lease_id, last_token in zip(
                lease_ids[went_on].tolist(), num_tokens[went_on].tolist(), strict=True
            ):
                self._went_on(lease_id, last_token)
            self._end(lease_ids[is_done & (verbs == _RELEASE)].tolist())
        for asked, granted in zip(command.reserves, reply.reserves, strict=True):
            if isinstance(granted, e.Reserved):
                self._granted(asked, granted, now)

    def _went_on(self, lease_id: int, last_token: int) -> None:
        request = self._requests.get(lease_id)
        if request is not None and last_token > request.last_token:
            request.last_token = last_token

    def _end(self, lease_ids: Iterable[int]) -> None:
        """Hand over the requests of leases that have ended; a lease that ranks share ends when the last rank parts."""
        for lease_id in lease_ids:
            if lease_id in self._requests and not self._core.has_lease(lease_id):
                request = self._requests.pop(lease_id)
                for recording in self._recordings:
                    recording.add(request)


def _parted(keys: bytes) -> Iterator[bytes]:
    """Yield the keys of several requests in parts without a key that comes twice: where one does, a request begins."""
    if are_distinct(keys):
        yield keys
        return
    begin = 0
    seen: set[bytes] = set()
    for place, key in enumerate(split_keys(keys)):
        if key in seen:
            yield keys[begin * BYTES_PER_KEY : place * BYTES_PER_KEY]
            begin = place
            seen.clear()
        seen.add(key)
    yield keys[begin * BYTES_PER_KEY :]


class _Recording:
    """One reader of a trace and what it has not read yet."""

    def __init__(self, *, began_at: float, tokens_per_key: int) -> None:
        """Begin with a new secret, which nobody is told."""
        self._began_at = began_at
        self._tokens_per_key = tokens_per_key
        self._secret = secrets.token_bytes(_BYTES_PER_SECRET)
        self._queue: deque[tuple[int, _Request]] = deque()
        """Each request, with the number of requests that were dropped just before it."""
        self._num_keys = 0
        self._num_dropped = 0
        self._waiting: asyncio.Future[None] | None = None

    def add(self, request: _Request) -> None:
        """Queue a request, or drop it if the reader is far behind."""
        if request.granted_at < self._began_at:
            return
        num_keys = len(request.keys) // BYTES_PER_KEY
        if len(self._queue) >= REQUESTS_QUEUED_MAX or self._num_keys + num_keys > KEYS_QUEUED_MAX:
            self._num_dropped += 1
            return
        self._queue.append((self._num_dropped, request))
        self._num_dropped = 0
        self._num_keys += num_keys
        self.wake()

    def wake(self) -> None:
        """Have the reader look again."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self) -> None:
        """Wait until there may be something to tell."""
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    @property
    def has_next(self) -> bool:
        """Whether a request waits for the reader, or requests that were dropped after the last one are not told yet."""
        return bool(self._queue or self._num_dropped)

    def next(self) -> tuple[int, _Request | None]:
        """Take the next request; None if some were dropped, and none has come since."""
        if not self._queue:
            num_dropped, self._num_dropped = self._num_dropped, 0
            return num_dropped, None
        num_dropped, request = self._queue.popleft()
        self._num_keys -= len(request.keys) // BYTES_PER_KEY
        return num_dropped, request

    async def told(self, queued: tuple[int, _Request | None]) -> pb.TraceResponse:
        """Return the message that tells the reader of a request, or only of those that were dropped."""
        num_dropped, request = queued
        if request is None:
            return pb.TraceResponse(tokens_per_key=self._tokens_per_key, num_dropped=num_dropped)
        return pb.TraceResponse(
            timestamp_ms=round((request.granted_at - self._began_at) * 1000),
            input_tokens=request.input_tokens,
            output_tokens=max(0, request.last_token - request.input_tokens),
            key_digests=await self._digests(request.keys),
            tokens_per_key=self._tokens_per_key,
            hit_tokens=request.hit_tokens,
            num_dropped=num_dropped,
        )

    async def _digests(self, keys: bytes) -> bytes:
        """Return the digests of keys for the reader; other callers have their turn meanwhile."""
        digests = []
        for begin in range(0, len(keys), BYTES_PER_KEY * _KEYS_AT_ONCE):
            if begin:
                await asyncio.sleep(0)
            digests += [
                blake3(keys[at : at + BYTES_PER_KEY], key=self._secret).digest(_BYTES_PER_DIGEST)
                for at in range(
                    begin, min(begin + BYTES_PER_KEY * _KEYS_AT_ONCE, len(keys)), BYTES_PER_KEY
                )
            ]
        return b"".join(digests)
