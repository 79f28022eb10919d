"""Own the remembered replies, by which a retry gets the answer of the first try; refusals are not remembered."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

import xxhash
from google.protobuf.message import Message

from kvlease.errors import IdReusedError

T = TypeVar("T")

Answer = Message | asyncio.Future[Message]
"""A reply, or a future of one."""

KEY_CHARACTERS_MAX: Final = 128
"""Characters of an idempotency key."""


class Leaving(asyncio.Future[T]):
    """A future whose cancellation takes effect at once, so that what is given out next goes to a caller still there."""

    def __init__(self, leave: Callable[[], None]) -> None:
        """Take the function that is called when the waiting caller has gone."""
        super().__init__(loop=asyncio.get_running_loop())
        self._leave = leave

    def cancel(self, msg: object = None) -> bool:
        """Cancel the future, and call `leave` at once."""
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self._leave()
        return is_cancelled


class _Follower(Leaving[Message]):
    """A future that gets the result of another one."""

    def __init__(self, hurry: Callable[[], None], leave: Callable[[], None]) -> None:
        super().__init__(leave)
        self._hurry = hurry

    def cancel(self, msg: object = None) -> bool:
        self._hurry()
        return super().cancel(msg)


class Shared:
    """A pending reply that several tries wait for; the work is given up only when all of them have gone."""

    def __init__(self, work: asyncio.Future[Message]) -> None:
        """Take the work, whose result all followers get."""
        self._work = work
        self._followers: set[asyncio.Future[Message]] = set()
        work.add_done_callback(self._settle)

    def follow(self) -> asyncio.Future[Message]:
        """Return a future of the same reply that can be cancelled on its own."""
        follower = _Follower(self._hurry, lambda: self._left(follower))
        self._followers.add(follower)
        return follower

    def _hurry(self) -> None:
        """Hand over a result that is there already: a follower that leaves now has been answered, and must get it."""
        if self._work.done():
            self._settle(self._work)

    def _left(self, follower: asyncio.Future[Message]) -> None:
        self._followers.discard(follower)
        if not self._followers:
            self._work.cancel()

    def _settle(self, work: asyncio.Future[Message]) -> None:
        error = None if work.cancelled() else work.exception()
        followers, self._followers = self._followers, set()
        for follower in [follower for follower in followers if not follower.done()]:
            if work.cancelled():
                follower.cancel()
            elif error is not None:
                follower.set_exception(error)
            else:
                follower.set_result(work.result())


class Replies:
    """The last replies to one caller, by verb and idempotency key."""

    def __init__(self, max_replies: int) -> None:
        """Remember up to `max_replies`, the newest, and all that are pending."""
        self._max_replies = max_replies
        self._num_pending = 0
        self._entries: OrderedDict[tuple[str, str], tuple[int, Message | Shared]] = OrderedDict()
        self.names = self._entries.keys()
        """The verbs and keys of the replies that are remembered."""

    def __len__(self) -> int:
        """Count the replies that are remembered."""
        return len(self._entries)

    def known(self, name: tuple[str, str]) -> Message | Shared | None:
        """Return the remembered reply to a verb and key, whatever the call's body was."""
        _, reply = self._entries.get(name, (0, None))
        return reply

    def forget(self, name: tuple[str, str]) -> None:
        """Drop a reply that is no longer true."""
        del self._entries[name]

    def recall(self, verb: str, key: str, digest: int) -> Answer:
        """Return the remembered reply to this very call, or a future of it.

        Raises:
            IdReusedError: the key was used for a call with another body.
        """
        known, reply = self._entries[verb, key]
        if known != digest:
            message = (
                f"the idempotency key was already used for a different {verb}; a retry must "
                "repeat the call exactly"
            )
            raise IdReusedError(message, resource="idempotency_key")
        return reply.follow() if isinstance(reply, Shared) else reply

    def promise(
        self, verb: str, key: str, digest: int, work: asyncio.Future[Message]
    ) -> asyncio.Future[Message]:
        """Remember a reply that is still pending, and return a future of it."""
        shared = Shared(work)
        self._num_pending += 1
        self.remember(verb, key, digest, shared)
        work.add_done_callback(lambda done: self._settle((verb, key), (digest, shared), done))
        return shared.follow()

    def remember(self, verb: str, key: str, digest: int, reply: Message | Shared) -> None:
        """Keep a reply for retries of its call; forget the oldest that was given if there are too many."""
        self._entries[verb, key] = (digest, reply)
        if len(self._entries) - self._num_pending > self._max_replies:
            # Not a pending one: a retry of its call would be carried out beside it.
            oldest = (
                name for name, (_, one) in self._entries.items() if not isinstance(one, Shared)
            )
            del self._entries[next(oldest)]

    def _settle(
        self, name: tuple[str, str], pending: tuple[int, Shared], done: asyncio.Future[Message]
    ) -> None:
        """Have a reply, the newest, for the pending one, or nothing if the call was refused."""
        assert self._entries[name] == pending, "a pending reply stays"
        self._num_pending -= 1
        del self._entries[name]
        if not done.cancelled() and done.exception() is None:
            self.remember(*name, pending[0], done.result())


def digest_of(request: Message, cache: str = "", salt: int = 0) -> int:
    """Return 128 bits that tell one call's body and cache from another's; no secret is needed, as keys are its own."""
    if cache:
        salt ^= xxhash.xxh3_64_intdigest(cache.encode())
    # No request has a map field, whose order could differ from one packing to the next.
    return xxhash.xxh3_128_intdigest(request.SerializeToString(), salt)
