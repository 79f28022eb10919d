"""Retries get the answer of the first try."""

import asyncio
from collections.abc import Callable

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from kvlease.errors import IdReusedError, PoolFullError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.calls.idempotency import Answer, Leaving, Replies, digest_of

REPLY = pb.ReleaseResponse(released=True)


def answer(
    replies: Replies, verb: str, key: str, digest: int, work: Callable[[], Answer]
) -> Answer:
    """Answer a call as the daemon does: carry it out once, and then answer from memory."""
    if (verb, key) in replies.names:
        return replies.recall(verb, key, digest)
    found = work()
    if isinstance(found, asyncio.Future):
        return replies.promise(verb, key, digest, found)
    replies.remember(verb, key, digest, found)
    return found


def test_refusal_is_not_remembered() -> None:
    """A call that was refused may succeed when it is repeated."""
    replies = Replies(4)

    def refuse() -> Message:
        raise PoolFullError

    with pytest.raises(PoolFullError):
        answer(replies, "release", "k", 1, refuse)

    assert answer(replies, "release", "k", 1, lambda: REPLY) is REPLY


def test_oldest_reply_is_forgotten_first() -> None:
    """At most so many replies as the limit are kept; the oldest goes first."""
    replies = Replies(2)
    for key in ("a", "b", "c"):
        answer(replies, "release", key, 1, lambda: REPLY)

    assert len(replies) == 2
    assert answer(replies, "release", "a", 2, lambda: REPLY) is REPLY
    with pytest.raises(IdReusedError):
        answer(replies, "release", "c", 2, lambda: REPLY)


async def test_retry_of_a_waiting_call_shares_its_answer() -> None:
    """Two tries of a waiting call do the work once, and either may leave without harming the other."""
    replies, work = Replies(4), asyncio.get_running_loop().create_future()
    calls = []

    def wait() -> asyncio.Future[Message]:
        calls.append(1)
        return work

    first = answer(replies, "reserve", "k", 1, wait)
    second = answer(replies, "reserve", "k", 1, wait)
    assert isinstance(first, asyncio.Future)
    assert isinstance(second, asyncio.Future)
    first.cancel()
    await asyncio.sleep(0)
    work.set_result(REPLY)

    assert await second is REPLY
    assert len(calls) == 1
    assert answer(replies, "reserve", "k", 1, wait) is REPLY


async def test_work_is_given_up_when_nobody_waits() -> None:
    """When all callers that wait for a call have gone, the call is cancelled."""
    replies, work = Replies(4), asyncio.get_running_loop().create_future()
    waiting = answer(replies, "reserve", "k", 1, lambda: work)
    assert isinstance(waiting, asyncio.Future)

    waiting.cancel()
    await asyncio.sleep(0)

    assert work.cancelled()


async def test_late_refusal_reaches_every_try() -> None:
    """A waiting call that is refused is refused to each of its tries, and the refusal is not remembered."""
    replies, work = Replies(4), asyncio.get_running_loop().create_future()
    tries = [answer(replies, "reserve", "k", 1, lambda: work) for _ in range(2)]

    work.set_exception(PoolFullError())

    for one in tries:
        assert isinstance(one, asyncio.Future)
        with pytest.raises(PoolFullError):
            await one
    assert len(replies) == 0


async def test_pending_reply_is_never_forgotten() -> None:
    """However many replies come after it, a retry waits for the first try; once it is given, it is the newest."""
    replies, work = Replies(1), asyncio.get_running_loop().create_future()
    calls = []

    def wait() -> asyncio.Future[Message]:
        calls.append(1)
        return work

    first = answer(replies, "evict", "k", 1, wait)
    for key in ("a", "b"):
        answer(replies, "commit", key, 1, pb.CommitResponse)
    retry = answer(replies, "evict", "k", 1, wait)
    assert list(replies.names) == [("evict", "k"), ("commit", "b")]
    work.set_result(pb.EvictResponse(num_evicted=1))

    assert isinstance(first, asyncio.Future)
    assert isinstance(retry, asyncio.Future)
    assert (await first, await retry) == (work.result(), work.result())
    assert len(calls) == 1
    assert list(replies.names) == [("evict", "k")]


def test_digest_tells_bodies_apart() -> None:
    """Equal bodies of calls about one cache have equal digests; different bodies or caches have different ones."""
    one, same, other = (pb.ReleaseRequest(lease_id=number) for number in (1, 1, 2))

    assert digest_of(one) == digest_of(same) != digest_of(other)
    assert digest_of(one, salt=5) != digest_of(one)
    assert len({digest_of(one, cache) for cache in ("", "a", "b")}) == 3


def test_body_is_packed_in_one_way() -> None:
    """No request message has a map field: the order of its entries could vary, and so could the digest."""

    def has_map(kind: Descriptor) -> bool:
        parts = [field.message_type for field in kind.fields if field.message_type]
        return any(part.GetOptions().map_entry or has_map(part) for part in parts)

    assert not has_map(pb.Call.DESCRIPTOR)


async def test_try_that_is_given_up_takes_effect_at_once() -> None:
    """When the only try is given up, its work is cancelled at once, so nothing is granted without a caller."""
    left: list[bool] = []
    work = Leaving[Message](lambda: left.append(True))
    replies = Replies(4)
    only = answer(replies, "reserve", "k", 1, lambda: work)
    assert isinstance(only, asyncio.Future)

    only.cancel()

    assert (work.cancelled(), left) == (True, [True])


async def test_try_that_is_given_up_too_late_is_answered() -> None:
    """A try that is cancelled after its work is done still gets the answer, which its caller can give back."""
    replies, work = Replies(4), asyncio.get_running_loop().create_future()
    late = answer(replies, "reserve", "k", 1, lambda: work)
    assert isinstance(late, asyncio.Future)
    work.set_result(REPLY)

    assert not late.cancel()

    assert late.result() is REPLY
