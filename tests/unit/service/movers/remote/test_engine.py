"""A remote mover moves exactly the bytes that labels name, through a real server, and takes no others for them."""

import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest
from redis import Redis

from kvleased.core.effects import Direction
from kvleased.movers.protocol import Completion, Told
from kvleased.movers.remote.bounded import Bounded, StuckError
from kvleased.movers.remote.engine import RemoteEngine
from kvleased.movers.remote.store import RemoteError, RemoteStore
from kvleased.movers.remote.value import HEADER_BYTES
from tests.servers.redis import RedisServer
from tests.unit.service.movers.remote.remote_node import (
    NUM_BLOCKS,
    NUM_SLOTS,
    Node,
    labels,
    served,
    served_by_process,
    wait_until,
)

EVERY_SLOT = list(range(NUM_SLOTS))


def _names(server: RedisServer) -> list[bytes]:
    with server.client() as client:
        return sorted(client.keys())


def _lives(server: RedisServer) -> list[int]:
    """Return each value's seconds to live, and -1 for values without a limit."""
    with server.client() as client:
        return sorted(client.ttl(name) for name in client.scan_iter())


def test_hit_prolongs_a_life_and_never_shortens_one(redis: RedisServer) -> None:
    """A loaded value lives as long as a new one; a value that another node keeps for longer is left as it is."""
    with served(redis.url, ttl_seconds=100) as node:
        node.share([0, 1, 2, 3], [0, 1, 2, 3])
        with redis.client() as client:
            for name in client.scan_iter():
                client.expire(name, 10)
        node.fetch([0, 1], [0, 1])
        lives = _lives(redis)
        assert [life <= 10 for life in lives] == [True, True, False, False]
        assert all(90 < life <= 100 for life in lives[2:])

        with redis.client() as client:
            first, second, *_ = sorted(client.keys())
            client.persist(first)
            client.expire(second, 1_000)
        assert not node.fetch([0, 1, 2, 3], [0, 1, 2, 3]).failed

        lives = _lives(redis)
        assert (lives[0], lives[-1] > 900) == (-1, True)


def test_life_without_a_limit_is_left_alone(redis: RedisServer) -> None:
    """Without a time to live, loading a value does not change its life."""
    with served(redis.url) as node:
        node.share([0], [0])
        node.fetch([0], [0])

        assert _lives(redis) == [-1]


def test_hit_counts_although_its_life_cannot_be_prolonged(redis: RedisServer) -> None:
    """If the user may not write or the server is too old, a hit is served, and its life stays as it is."""
    with served(redis.url) as node:
        node.share([0], [0])
    with redis.client() as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "+@read", "+ping", "~*")

    with served(f"redis://reader:pw@127.0.0.1:{redis.port}", ttl_seconds=100) as node:
        assert not node.fetch([0], [0]).failed

    assert _lives(redis) == [-1]


def test_what_one_node_shares_another_fetches(redis: RedisServer) -> None:
    """Blocks come to another node's device as they lay in the first node's host slots, with their checksums."""
    with served(redis.url) as here, served(f"unix://{redis.socket}", seed=2) as there:
        shared = here.share(EVERY_SLOT, EVERY_SLOT, sums=here.sums(EVERY_SLOT))
        fetched = there.fetch([20, 3, 4], [7, 0, 11])

    assert (shared.is_done, shared.failed) == (True, ())
    assert (fetched.is_done, fetched.failed) == (True, ())
    assert fetched.checksums == here.sums([7, 0, 11])
    for block_id, slot_id in ((20, 7), (3, 0), (4, 11)):
        assert np.array_equal(there.block(block_id), here.slots[slot_id])
    others = [one for one in range(NUM_BLOCKS) if one not in {20, 3, 4}]
    assert not there.device[:, others].any()
    assert (shared.num_bytes, fetched.num_bytes) == (12 * here.slot_bytes, 3 * here.slot_bytes)


def test_what_is_not_there_fails_by_position(redis: RedisServer) -> None:
    """A miss leaves its block as it was and has no checksum; the other blocks come."""
    with served(redis.url) as node:
        node.device[:] = 9
        node.share([1, 2], [1, 2])
        fetched = node.fetch([5, 6, 7], [1, 99, 2])
        asked = node.ask([99, 1, 2, 98])

    assert fetched.failed == (1,)
    assert np.frombuffer(fetched.checksums, np.uint64)[1] == 0
    assert (node.block(6) == 9).all()
    assert np.array_equal(node.block(7), node.slots[2])
    assert asked == bytes([0, 1, 1, 0])


def test_slot_that_is_not_what_it_was_is_not_shared(redis: RedisServer) -> None:
    """A host slot with a flipped bit fails at its position, and never reaches the store."""
    with served(redis.url) as node:
        sums = node.sums([0, 1, 2])
        node.slots[1, 100] ^= 4

        shared = node.share([0, 1, 2], [0, 1, 2], sums=sums)
        asked = node.ask([0, 1, 2])

    assert shared.failed == (1,)
    assert asked == bytes([1, 0, 1])


def test_slots_without_checksum_are_shared_as_they_are(redis: RedisServer) -> None:
    """If a slot has no checksum, the header gets the checksum of the bytes that are sent."""
    with served(redis.url) as node:
        shared = node.share([3], [3], sums=bytes(8))
        fetched = node.fetch([0], [3])

    assert shared.failed == fetched.failed == ()
    assert fetched.checksums == node.sums([3])


def test_what_is_in_the_store_is_not_sent_again(redis: RedisServer) -> None:
    """A block that any node has shared is not sent again, and counts as shared."""
    with served(redis.url) as here, served(redis.url, seed=2) as there:
        here.share([0, 1], [0, 1])
        shared = there.share([4, 5, 6], [0, 1, 2])

    assert shared.failed == ()
    assert shared.num_bytes == there.slot_bytes


def test_values_of_others_are_never_taken(redis: RedisServer) -> None:
    """The same block key has another name in another tenant or another layout."""
    with served(redis.url) as here, served(redis.url, fingerprint="ab" * 32) as there:
        here.share([0], [0])

        assert here.fetch([0], [0], tenant=6).failed == (0,)
        assert there.fetch([0], [0]).failed == (0,)
        assert there.ask([0]) == b"\0"


@pytest.mark.parametrize("fingerprint", ["", "zz" * 32, "ab"])
def test_layout_that_nobody_knows_has_no_values(redis: RedisServer, fingerprint: str) -> None:
    """Without a layout fingerprint nothing is shared, found or fetched."""
    with served(redis.url, fingerprint=fingerprint) as node:
        shared, fetched, asked = node.share([0], [0]), node.fetch([0], [0]), node.ask([0])

    assert shared.failed == fetched.failed == (0,)
    assert asked == b""
    assert _names(redis) == []


def test_names_tell_nothing_that_a_client_said(redis: RedisServer) -> None:
    """Each name consists of the prefix and a digest."""
    with served(redis.url) as node:
        node.share([0, 1], [0, 1])

    assert all(
        name.startswith(b"kvlease:1:") and len(bytes.fromhex(name[10:].decode())) == 32
        for name in _names(redis)
    )


def _name_of(client: Redis, slot: bytes) -> bytes:
    return next(one for one in client.scan_iter() if client.get(one)[HEADER_BYTES:] == slot)


def _flip(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda value: _flip(value, 0), id="magic"),
        pytest.param(lambda value: _flip(value, HEADER_BYTES - 1), id="header checksum"),
        pytest.param(lambda value: _flip(value, HEADER_BYTES), id="first byte"),
        pytest.param(lambda value: _flip(value, len(value) - 1), id="last byte"),
        pytest.param(lambda value: value[:-1], id="truncated"),
        pytest.param(lambda value: value + b"\0", id="too long"),
        pytest.param(lambda value: value * 50, id="far too long"),
        pytest.param(lambda value: value[:HEADER_BYTES], id="only a header"),
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(lambda value: bytes(len(value)), id="zeros"),
    ],
)
def test_spoiled_value_is_a_miss_and_goes(
    redis: RedisServer, spoil: Callable[[bytes], bytes]
) -> None:
    """A value that was not stored under its label is a miss, and is deleted to make room."""
    with served(redis.url) as node, redis.client() as client:
        node.device[:] = 9
        node.share([0, 1], [0, 1])
        name = _name_of(client, node.slots[0].tobytes())
        client.set(name, spoil(client.get(name)))

        fetched = node.fetch([5, 6], [0, 1])
        untouched = bool((node.block(5) == 9).all())
        again = node.share([0], [0])
        healed = node.fetch([5], [0])

    assert fetched.failed == (0,)
    assert untouched
    assert np.array_equal(node.block(6), node.slots[1])
    assert again.failed == healed.failed == ()
    assert np.array_equal(node.block(5), node.slots[0])


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda value: _flip(value, 0), id="flipped"),
        pytest.param(lambda value: value[:-1], id="truncated"),
        pytest.param(lambda value: value + b"\0", id="too long"),
    ],
)
def test_spoiled_value_is_found_out_by_the_fetch_that_follows_a_question(
    redis: RedisServer, spoil: Callable[[bytes], bytes]
) -> None:
    """A spoiled value of whatever length is said to be there, so that it is fetched, counted as a miss, and dropped."""
    with served(redis.url) as node, redis.client() as client:
        node.share([0, 1], [0, 1])
        name = _name_of(client, node.slots[0].tobytes())
        client.set(name, spoil(client.get(name)))

        asked = node.ask([0, 1, 99])
        fetched = node.fetch([5, 6], [0, 1])
        wait_until(lambda: not client.exists(name))

        assert (asked, fetched.failed) == (bytes([1, 1, 0]), (0,))
        assert node.ask([0, 1]) == bytes([0, 1])


def test_value_of_another_length_is_replaced(redis: RedisServer) -> None:
    """A block is shared although its name has a value of another length, which it takes the place of."""
    with served(redis.url) as node, redis.client() as client:
        node.share([0], [0])
        (name,) = client.keys()
        client.set(name, client.get(name)[:-1])

        again = node.share([0], [0])

        assert (again.failed, again.num_bytes) == ((), node.slot_bytes)
        assert not node.fetch([5], [0]).failed


def test_swapped_values_are_misses(redis: RedisServer) -> None:
    """Two whole values, each under the other's name, are both misses."""
    with served(redis.url) as node, redis.client() as client:
        node.share([0, 1], [0, 1])
        first, second = client.keys()
        values = client.mget(first, second)
        client.mset({first: values[1], second: values[0]})

        fetched = node.fetch([5, 6], [0, 1])

    assert fetched.failed == (0, 1)
    assert not node.device.any()


def test_value_of_another_type_is_found_out_as_any_that_is_spoiled(redis: RedisServer) -> None:
    """A list under the name of a block is said to be there, fetched, counted as a miss of that block, and dropped."""
    with served(redis.url) as node, redis.client() as client:
        node.share([0, 1], [0, 1])
        name = _name_of(client, node.slots[0].tobytes())
        client.delete(name)
        client.rpush(name, "a", "b")

        asked, fetched = node.ask([0, 1, 99]), node.fetch([5, 6], [0, 1])
        wait_until(lambda: not client.exists(name))
        told = node.ask([0, 1])

        assert (asked, fetched.failed, told) == (bytes([1, 1, 0]), (0,), bytes([0, 1]))


def test_value_of_another_type_is_replaced(redis: RedisServer) -> None:
    """A block is shared although its name has a list, which it takes the place of."""
    with served(redis.url) as node, redis.client() as client:
        node.share([0], [0])
        (name,) = client.keys()
        client.delete(name)
        client.rpush(name, "a", "b")

        again = node.share([0], [0])

        assert (again.failed, again.num_bytes) == ((), node.slot_bytes)
        assert not node.fetch([5], [0]).failed


@pytest.mark.parametrize(
    ("direction", "ids", "num_labels"),
    [
        pytest.param(Direction.SHARE, [NUM_SLOTS], 1, id="slot beyond"),
        pytest.param(Direction.FETCH, [NUM_BLOCKS], 1, id="block beyond"),
        pytest.param(Direction.FETCH, [-1], 1, id="negative"),
        pytest.param(Direction.SHARE, [0, 1], 1, id="label missing"),
        pytest.param(Direction.OFFLOAD, [0], 1, id="not its direction"),
    ],
)
def test_batch_out_of_bounds_is_refused(
    redis: RedisServer, direction: Direction, ids: list[int], num_labels: int
) -> None:
    """A batch with a position out of bounds is refused whole, and the next batch is served."""
    packed = np.array(ids, np.int32).tobytes()
    end = "source_ids" if direction is Direction.SHARE else "target_ids"
    with served(redis.url) as node:
        number = node.send(direction, labels(list(range(num_labels))), **{end: packed})  # type: ignore[arg-type]

        assert node.answer(number) == Completion(number=number, is_done=False)
        assert node.share([0], [0]).failed == ()


def test_pools_that_are_not_mapped_have_nothing(redis: RedisServer) -> None:
    """After the pools are unmapped batches are refused; batches sent before are done."""
    with served(redis.url) as node:
        before = node.send_share([0, 1], [0, 1])
        node.unmap()
        after = node.send_share([2], [2])
        asked = node.send_ask([0])

        assert node.completion(before).failed == ()
        assert not node.completion(after).is_done
        assert node.answer(asked) == Told(number=asked)


def test_questions_and_fetches_go_before_shares(redis: RedisServer) -> None:
    """Questions and fetches, for which requests wait, go before shares."""
    redis.stop()
    try:
        with served(redis.url) as node:
            first = node.send_ask([0])
            shares = [node.send_share([one], [one]) for one in range(3)]
            asked = node.send_ask([0])
            fetched = node.send(Direction.FETCH, labels([0]), target_ids=bytes(4))
            redis.go_on()
            while len(node.order_heard) < 6:
                node.hear()

            assert node.order_heard == [first, asked, fetched, *shares]
    finally:
        redis.go_on()


def test_process_serves_as_the_supervisor_starts_it(redis: RedisServer) -> None:
    """The command line's role takes settings and link as descriptors, and ends with its link."""
    with served_by_process(redis.url) as (node, process):
        node.share([0], [0])
        fetched = node.fetch([9], [0])
        node.link.close()

        assert process.wait(60) == 0
    assert fetched.failed == ()
    assert np.array_equal(node.block(9), node.slots[0])


def test_nothing_is_connected_before_a_cache_is_mapped() -> None:
    """A mover without a mapped cache connects to no store."""
    calls: list[str] = []

    def opened() -> RemoteStore:
        calls.append("open")
        raise AssertionError

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        engine = RemoteEngine(theirs, Bounded(opened), seconds_max=1)
        ours.close()
        engine.run()

    assert calls == []


def test_call_that_never_ends_ends_the_engine() -> None:
    """If a call hangs for ever, the engine says so, and its process ends."""
    may_end = threading.Event()

    def opened() -> RemoteStore:
        may_end.wait(60)
        raise RemoteError("too late")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        stuck = Bounded(opened, stuck_seconds_max=0)
        engine = RemoteEngine(theirs, stuck, seconds_max=0.01)
        node = Node(ours)
        number = node.send_ask([0])

        with pytest.raises(StuckError):
            engine.run()

        assert node.answer(number) == Told(number=number)
    may_end.set()


def test_large_values_travel_in_several_calls(redis: RedisServer) -> None:
    """Values above one call's limit arrive whole."""
    with served(redis.url, page_bytes=1 << 18) as node:
        shared = node.share(EVERY_SLOT, EVERY_SLOT)
        fetched = node.fetch(EVERY_SLOT, EVERY_SLOT)

    assert shared.failed == fetched.failed == ()
    assert all(np.array_equal(node.block(one), node.slots[one]) for one in EVERY_SLOT)


def test_node_shows_its_life(redis: RedisServer) -> None:
    """The first message of a mover says whether its store is there."""
    with served(redis.url) as node:
        assert node.status().is_on
    assert isinstance(node, Node)
