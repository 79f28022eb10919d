"""Nodes that share a remote store: one hits what another commits, and the store's faults are misses in time."""

import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from redis import Redis

from kvlease import CacheOptions, Client, FullAttention, Lease, PlanInputs, Worker
from tests.acceptance import soaking
from tests.acceptance.serving import Serving, served
from tests.acceptance.soak_worker import Request
from tests.acceptance.tiering import (
    CACHE,
    TOKENS_PER_BLOCK,
    WRITE_THROUGH,
    child,
    child_or_none,
    compute,
    counter,
    inputs_of,
    prompt,
    status,
)
from tests.servers import mooncake
from tests.servers.faulty import Fault, FaultyServer
from tests.servers.mooncake import MooncakeMaster
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.acceptance

NUM_BLOCKS = 8
NUM_TOKENS = NUM_BLOCKS * TOKENS_PER_BLOCK
LONG = 2500
"""Blocks of a prefix that is asked for in three packets."""
PASSWORD = "correct-horse"
PATIENCE_MS = 60_000
"""Milliseconds that a call lets the daemon wait; its wait for the store should be far shorter."""
SECONDS_TO_ANSWER = 20.0
"""Many time budgets of the store, also on a busy machine, but far less than PATIENCE_MS."""


@dataclass(frozen=True)
class Node:
    """One daemon's cache, with a worker."""

    serving: Serving
    client: Client
    worker: Worker

    def compute(self, number: int, num_blocks: int = NUM_BLOCKS) -> Lease:
        """Compute a prompt, compare its hits, and release it."""
        lease = compute(self.worker, prompt(number, num_blocks))
        lease.release()
        return lease

    def share(self, number: int) -> None:
        """Compute a prompt that no node has, and wait until the remote store has it."""
        shared = counter(self.client, "remote_stores")
        assert not self.compute(number).hit_tokens
        self.serving.until(lambda: counter(self.client, "remote_stores") == shared + NUM_BLOCKS)


@contextmanager
def node(
    serving: Serving,
    plan: PlanInputs,
    *,
    cache: str = CACHE,
    tenant: str = "default",
    options: CacheOptions = WRITE_THROUGH,
) -> Iterator[Node]:
    """Register a daemon's cache if it is not, wait until all its tiers work, and attach a worker."""
    with Client(serving.address("unix"), on_doubt="raise") as client:
        client.register(cache, plan, options)
        serving.until(lambda: client.get_cache(cache).status == "ready")
        serving.until(lambda: all(one.status == "ready" for one in client.get_cache(cache).tiers))
        with client.attach(cache, tenant=tenant) as worker:
            yield Node(serving, client, worker)
        serving.until(lambda: not client.stats(cache).caches[0].num_workers)
        client.delete_cache(cache)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Make a private directory with a short name."""
    path = Path(tempfile.mkdtemp(prefix="kvlease-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def redis(folder: Path) -> Iterator[RedisServer]:
    """Run a server that persists nothing and wants a password."""
    (folder / "redis").mkdir()
    server = RedisServer(folder / "redis", "--requirepass", PASSWORD)
    yield server
    server.go_on()
    server.kill()


def options_of(folder: Path, url: str, *more: str) -> list[str]:
    """Return the options of a daemon that shares a store and a secret."""
    return ["--secret-file", str(folder / "secret"), "--remote-url", url, *more]


def url_of(redis: RedisServer, port: int = 0) -> str:
    """Return the server's URL, with its password."""
    return f"redis://:{PASSWORD}@127.0.0.1:{port or redis.port}"


@pytest.fixture(scope="module")
def daemons(folder: Path, redis: RedisServer) -> Iterator[tuple[Serving, Serving]]:
    """Run two daemons on sockets of their own with one secret; the second has a disk store, too."""
    disk_dir = folder / "disk"
    disk_dir.mkdir(mode=0o700)
    for name in "ab":
        (folder / name).mkdir()
    more = ("--disk-dir", str(disk_dir))
    with ExitStack() as stack:
        one = Serving(folder / "a" / "run", *options_of(folder, url_of(redis)))
        stack.callback(one.stop)
        other = Serving(folder / "b" / "run", *options_of(folder, url_of(redis), *more))
        stack.callback(other.stop)
        one.wait_until_ready()
        other.wait_until_ready()
        yield one, other


@pytest.fixture
def nodes(daemons: tuple[Serving, Serving], redis: RedisServer) -> Iterator[tuple[Node, Node]]:
    """Give the two daemons with one cache, which no earlier test has filled."""
    with values_of(redis) as values:
        values.flushall()
    plan = inputs_of(remote=True, host_slots=256, device_blocks=256)
    with node(daemons[0], plan) as one, node(daemons[1], plan) as other:
        yield one, other


@contextmanager
def values_of(redis: RedisServer) -> Iterator[Redis]:
    """Give a client that may change the store's values."""
    with Redis(unix_socket_path=str(redis.socket), password=PASSWORD, protocol=2) as client:
        yield client


# Sharing --------------------------------------------------------------------------------------------------------------


def test_one_node_hits_what_another_committed(nodes: tuple[Node, Node]) -> None:
    """A second node hits every byte of a prefix that the first has written through; then the prefix is local there."""
    one, other = nodes
    one.share(1)

    first, second = other.compute(1), other.compute(1)

    assert (first.remote_hit_tokens, first.hit_tokens) == (NUM_TOKENS, NUM_TOKENS)
    assert (second.device_hit_tokens, second.hit_tokens) == (NUM_TOKENS, NUM_TOKENS)
    assert other.compute(1, NUM_BLOCKS // 2).hit_tokens == NUM_TOKENS // 2
    assert counter(other.client, "remote_loads") == NUM_BLOCKS


def test_nodes_build_on_each_others_prefixes(nodes: tuple[Node, Node], redis: RedisServer) -> None:
    """A conversation that moves between nodes is computed once: each turn by the node that serves it."""
    hits = []
    with values_of(redis) as values:
        for turn in range(4):
            now, num_blocks = nodes[turn % 2], 2 * (turn + 1)
            hits.append(now.compute(2, num_blocks).hit_tokens)
            now.serving.until(lambda count=num_blocks: values.dbsize() == count)  # type: ignore[misc]

    assert hits == [2 * turn * TOKENS_PER_BLOCK for turn in range(4)]


def test_long_prefix_comes_from_the_store_in_one_call(daemons: tuple[Serving, Serving]) -> None:
    """A prefix of more blocks than one packet asks for is hit whole by the first call of another node."""
    plan = replace(
        inputs_of(remote=True, host_slots=LONG, device_blocks=LONG),
        longest_request_tokens=LONG * TOKENS_PER_BLOCK,
    )
    with node(daemons[0], plan) as one, node(daemons[1], plan) as other:
        one.compute(3, LONG)
        one.serving.until(lambda: counter(one.client, "remote_stores") == LONG)

        assert other.compute(3, LONG).remote_hit_tokens == LONG * TOKENS_PER_BLOCK


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"tenant": "another"}, id="tenant"),
        pytest.param({"model_digest": "another model"}, id="model"),
        pytest.param({"dtype": "float16", "head_size": 32}, id="dtype"),
    ],
)
def test_what_differs_is_not_shared(nodes: tuple[Node, Node], change: dict[str, str | int]) -> None:
    """Another tenant or layout finds nothing, even with the same keys."""
    one, other = nodes
    one.share(3)
    keys = one.worker.keys.chain(prompt(3, NUM_BLOCKS), TOKENS_PER_BLOCK)
    layer = FullAttention(
        name="layer",
        num_kv_heads=2,
        head_size=int(change.get("head_size", 16)),
        dtype=str(change.get("dtype", "float32")),
    )
    plan = inputs_of(remote=True, host_slots=32, device_blocks=32)
    digest = str(change.get("model_digest", plan.model_digest))
    plan = replace(plan, layers=(layer,), model_digest=digest)
    tenant = str(change.get("tenant", "default"))

    with node(other.serving, plan, cache="another", tenant=tenant) as stranger:
        own = compute(stranger.worker, prompt(3, NUM_BLOCKS))
        theirs = stranger.worker.reserve(
            "theirs", keys=keys, num_tokens=NUM_TOKENS, wait_ms=PATIENCE_MS
        )
        own.release()

        assert own.hit_tokens == 0
        assert theirs.hit_tokens == (NUM_TOKENS if "model_digest" in change else 0)
    assert other.compute(3).remote_hit_tokens == NUM_TOKENS


def test_nodes_with_other_secrets_share_nothing(
    nodes: tuple[Node, Node], redis: RedisServer, folder: Path
) -> None:
    """A daemon with another secret asks for other names, and so finds nothing."""
    nodes[0].share(4)
    (folder / "c").mkdir()
    options = ["--secret-file", str(folder / "c" / "secret"), "--remote-url", url_of(redis)]

    with (
        served(folder / "c" / "run", *options) as serving,
        node(serving, inputs_of(remote=True)) as stranger,
    ):
        assert stranger.compute(4).hit_tokens == 0
        assert counter(stranger.client, "remote_asked") == NUM_BLOCKS


def test_windows_are_shared_and_go_to_disk(daemons: tuple[Serving, Serving]) -> None:
    """With two groups, and a disk store on one node, a prefix is as long there as both groups have it."""
    plan = soaking.inputs_of(is_hybrid=True)
    plans = (replace(plan, disk_bytes=0), plan)
    tokens = np.arange(200, dtype=np.int32)
    found = []
    for serving, own_plan in zip(daemons, plans, strict=True):
        with node(serving, own_plan, cache="windows") as one:
            for _ in range(2):
                keys = one.worker.keys.chain(tokens[:192], TOKENS_PER_BLOCK)
                lease = one.worker.reserve(
                    os.urandom(8).hex(), keys=keys, num_tokens=200, wait_ms=PATIENCE_MS
                )
                request = Request(one.worker, lease, tokens, lease.hit_tokens)
                found.append((lease.hit_tokens, lease.remote_hit_tokens, lease.disk_hit_tokens))
                assert request.wrong() == []
                while request.done < len(tokens):
                    lease.extend(len(tokens))
                    request.write(min(len(tokens), lease.covered_tokens))
                    lease.commit(request.done, request.keys[: request.done // 16 * 32])
                lease.release()
                settle(serving, one.client, "windows")
                one.client.evict(cache="windows", num_blocks=96)

    assert [hit[:2] for hit in found] == [(0, 0), (192, 0), (192, 192), (192, 0)]


def settle(serving: Serving, client: Client, cache: str) -> None:
    """Wait until twice in a row no copy is under way that a call could wait for."""
    seen: list[object] = []

    def is_steady() -> bool:
        stats = client.stats(cache).caches[0]
        seen.append((stats.counters, stats.pools))
        time.sleep(0.1)
        return len(seen) > 2 and seen[-1] == seen[-2] == seen[-3]

    serving.until(is_steady)


# Faults of the store --------------------------------------------------------------------------------------------------


def answered(node: Node, number: int) -> Lease:
    """Compute a prompt with PATIENCE_MS, and check that the store takes little of it."""
    started = time.monotonic()
    lease = node.compute(number)
    assert time.monotonic() - started < SECONDS_TO_ANSWER
    return lease


def reason_of(node: Node) -> str:
    """Return why the remote store is off."""
    return next(one.reason for one in node.client.get_cache(CACHE).tiers if one.tier == "remote")


@pytest.mark.thorough
def test_dead_store_is_off_and_comes_back_by_itself(
    nodes: tuple[Node, Node], redis: RedisServer
) -> None:
    """While the server is dead, calls miss in time and the tier says why, without a password; later they hit again."""
    one, other = nodes
    one.share(5)
    redis.kill()

    assert answered(other, 5).hit_tokens == 0
    other.serving.until(lambda: status(other.client, "remote") == "off")
    assert "refused" in reason_of(other)
    assert PASSWORD not in reason_of(other) + Path(other.serving.log.name).read_text()
    assert answered(other, 6).hit_tokens == 0

    redis.come_up()
    for each in nodes:
        each.serving.until(lambda each=each: status(each.client, "remote") == "ready")  # type: ignore[misc]
    one.share(7)
    assert other.compute(7).remote_hit_tokens == NUM_TOKENS


def test_store_that_lost_everything_is_filled_again(
    nodes: tuple[Node, Node], redis: RedisServer
) -> None:
    """A node shares the blocks of its host pool again when the store comes back empty."""
    one, other = nodes
    one.share(8)
    redis.kill()
    one.serving.until(lambda: status(one.client, "remote") == "off")

    redis.come_up()

    with values_of(redis) as values:
        one.serving.until(lambda: values.dbsize() == NUM_BLOCKS)
    other.serving.until(lambda: status(other.client, "remote") == "ready")
    assert other.compute(8).remote_hit_tokens == NUM_TOKENS


def test_silent_store_is_a_miss_in_time(nodes: tuple[Node, Node], redis: RedisServer) -> None:
    """A server that stands still costs a call its time budget, later calls nothing, and is hit when it goes on."""
    one, other = nodes
    one.share(9)
    redis.stop()
    try:
        assert answered(other, 9).hit_tokens == 0
        other.serving.until(lambda: status(other.client, "remote") == "off")
        assert answered(other, 10).hit_tokens == 0
    finally:
        redis.go_on()
    other.serving.until(lambda: status(other.client, "remote") == "ready")
    one.serving.until(lambda: status(one.client, "remote") == "ready")
    one.share(11)
    assert other.compute(11).remote_hit_tokens == NUM_TOKENS


Spoil = Callable[[list[bytes]], list[bytes]]


def flipped(value: bytes, at: int) -> bytes:
    """Return a value with one bit of a byte changed."""
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


def turned(values: list[bytes]) -> list[bytes]:
    """Return the values, each in another's place."""
    return [*values[1:], values[0]]


def crossed(values: list[bytes]) -> list[bytes]:
    """Return the values, each header with another value's bytes behind it."""
    pairs = zip(values, turned(values), strict=True)
    return [one[:128] + other[128:] for one, other in pairs]


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda values: [flipped(one, 200) for one in values], id="a bit"),
        pytest.param(lambda values: [flipped(one, 0) for one in values], id="a bit of the header"),
        pytest.param(lambda values: [one[:-1] for one in values], id="cut short"),
        pytest.param(lambda values: [one + b"\0" for one in values], id="too long"),
        pytest.param(lambda values: [b"" for _ in values], id="empty"),
        pytest.param(turned, id="exchanged"),
        pytest.param(crossed, id="bodies exchanged"),
        pytest.param(
            lambda values: [values[0], *(bytes(len(one)) for one in values[1:])],
            id="zeroes but for one",
        ),
    ],
)
def test_spoiled_values_are_misses(
    nodes: tuple[Node, Node], redis: RedisServer, spoil: Spoil
) -> None:
    """Whatever is done to values, no wrong byte is served, and good values replace them."""
    one, other = nodes
    one.share(12)
    with values_of(redis) as values:
        names = sorted(values.keys())
        good = [values.get(name) or b"" for name in names]
        for name, value in zip(names, spoil(good), strict=True):  # type: ignore[arg-type]
            values.set(name, value)

        lease = answered(other, 12)

        assert lease.hit_tokens < NUM_TOKENS
        other.serving.until(lambda: all(values.strlen(name) > 4096 for name in names))
    assert other.compute(12).hit_tokens == NUM_TOKENS


def test_value_of_another_type_is_a_miss(nodes: tuple[Node, Node], redis: RedisServer) -> None:
    """A name that holds another type of data is a miss, and no fault of the store."""
    one, other = nodes
    one.share(13)
    with values_of(redis) as values:
        for name in sorted(values.keys()):
            values.delete(name)
            values.rpush(name, b"x" * 4224)

    assert answered(other, 13).hit_tokens == 0
    assert status(other.client, "remote") == "ready"


# Faults of our own processes ------------------------------------------------------------------------------------------


class Withholding(FaultyServer):
    """A server in between that can withhold a value: other calls are answered, a fetch waits."""

    def __init__(self, upstream: str) -> None:
        self.is_told = False
        self.is_silent = threading.Event()
        super().__init__(upstream)

    def withhold(self) -> None:
        """Have the next fetch wait."""
        self.is_told = True
        self.is_silent.clear()

    def _hear(self, target: socket.socket, chunk: bytes) -> None:
        if self.is_told and b"GETRANGE" in chunk:
            self.fault = Fault.SILENCE
            self.is_told = False
            self.is_silent.set()
        super()._hear(target, chunk)


@pytest.fixture(scope="module")
def withholding(redis: RedisServer, folder: Path) -> Iterator[tuple[Serving, Withholding]]:
    """Run a third daemon, with a `Withholding` server between it and the store."""
    (folder / "d").mkdir()
    server = Withholding(str(redis.socket))
    options = options_of(folder, url_of(redis, server.port), "--remote-ms-max", "700")
    try:
        with served(folder / "d" / "run", *options) as serving:
            yield serving, server
    finally:
        server.close()


@pytest.fixture
def withheld(
    nodes: tuple[Node, Node], withholding: tuple[Serving, Withholding]
) -> Iterator[tuple[Node, Withholding]]:
    """Give that daemon's node, whose next fetch waits; the store has prompts 14 and 15."""
    nodes[0].share(14)
    nodes[0].share(15)
    serving, server = withholding
    server.fault = Fault.NONE
    with node(serving, inputs_of(remote=True)) as other:
        server.withhold()
        yield other, server


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGSTOP, marks=pytest.mark.thorough), signal.SIGKILL]
)
def test_remote_mover_fails_under_a_fetch(
    withheld: tuple[Node, Withholding], number: signal.Signals
) -> None:
    """While a mover stands still or dies in a fetch, control calls go on; the fetching call ends, the next one hits."""
    node, server = withheld
    mover = child(node.serving, "remote-mover")
    leases: list[Lease] = []
    caller = threading.Thread(target=lambda: leases.append(node.compute(14)))
    caller.start()
    try:
        assert server.is_silent.wait(SECONDS_TO_ANSWER)
        os.kill(mover, number)
        assert node.client.stats(CACHE).caches[0].num_workers == 1
        server.fault = Fault.NONE
    finally:
        caller.join()

    (lease,) = leases
    assert lease.hit_tokens == 0
    node.serving.until(lambda: child_or_none(node.serving, "remote-mover") not in {None, mover})
    node.serving.until(lambda: status(node.client, "remote") == "ready")
    assert node.compute(15).remote_hit_tokens == NUM_TOKENS


def test_control_process_dies_under_a_fetch(withheld: tuple[Node, Withholding]) -> None:
    """The next control process answers the waiting call, nothing stays held, and the store is hit again."""
    node, server = withheld
    leases: list[Lease] = []
    caller = threading.Thread(target=lambda: leases.append(node.compute(14)))
    caller.start()
    try:
        assert server.is_silent.wait(SECONDS_TO_ANSWER)
        server.fault = Fault.NONE
        node.serving.kill_control()
    finally:
        caller.join()

    (lease,) = leases
    assert lease.hit_tokens in {0, NUM_TOKENS}
    node.serving.until(lambda: status(node.client, "remote") == "ready")
    assert node.compute(15).remote_hit_tokens == NUM_TOKENS
    node.serving.until(lambda: not held(node.client))


def held(client: Client) -> int:
    """Count the blocks of all tiers that somebody holds."""
    return sum(
        pool.reserved + pool.filling + pool.ready_held + pool.quarantined
        for pool in client.stats(CACHE).caches[0].pools
    )


# Mooncake -------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_nodes_share_by_a_mooncake_master(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Mooncake store, too, a second node hits what the first has, and misses when the first has gone."""
    master = MooncakeMaster(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", mooncake.environment()["LD_LIBRARY_PATH"])
    work = Path(tempfile.mkdtemp(dir=folder))
    for name in "ab":
        (work / name).mkdir()
    options = options_of(folder, master.url)
    plan = inputs_of(remote=True)
    try:
        with (
            served(work / "a" / "run", *options) as first,
            served(work / "b" / "run", *options) as second,
            node(first, plan) as one,
            node(second, plan) as other,
        ):
            one.share(16)
            assert other.compute(16).remote_hit_tokens == NUM_TOKENS

            master.kill()

            assert answered(other, 17).hit_tokens == 0
            other.serving.until(lambda: status(other.client, "remote") == "off")
    finally:
        master.kill()
