"""Magazines over real processes: engines of several processes, whose processes and daemon are killed."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvlease import (
    AsyncClient,
    Client,
    ExchangeOrder,
    IdReusedError,
    WrongStateError,
)
from tests.acceptance.serving import Serving, blocks_in_use, command, new_cache
from tests.acceptance.test_client import INPUTS

pytestmark = pytest.mark.acceptance

SECONDS = 60
"""A deadline that a busy machine keeps."""
PROGRAM = """
import sys
from kvlease import Client, ExchangeOrder
worker = Client({address!r}).attach("demo", magazine={name!r})
mine = worker.magazine()
for line in sys.stdin:
    taken = mine.exchange(ExchangeOrder(take_running=int(line))).taken_running
    print(taken.tolist(), flush=True)
"""


@pytest.fixture
def client(daemon: Serving) -> Iterator[Client]:
    """Register a cache of 32 blocks, and give its client."""
    with new_cache(daemon, "demo", INPUTS) as client:
        yield client


def register_again(daemon: Serving, client: Client) -> None:
    """Register again the cache that was lost with the daemon's memory."""
    client.register("demo", INPUTS)
    daemon.until(lambda: client.get_cache("demo").status == "ready")


class Engine:
    """A process of an engine that takes blocks when told to."""

    def __init__(self, daemon: Serving, name: str) -> None:
        program = PROGRAM.format(address=daemon.address("unix"), name=name)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def takes(self, count: int) -> list[int]:
        """Have the process take blocks, and return the ids that it got."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        blocks = [int(one) for one in self.process.stdout.readline().strip("[]\n").split(",")]
        assert len(blocks) == count
        return blocks

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()


def test_magazine_ends_with_the_death_of_its_last_process(daemon: Serving, client: Client) -> None:
    """Killing the first process changes nothing; killing the last one frees all blocks."""
    first, second = Engine(daemon, "left"), Engine(daemon, "left")
    first.takes(3)
    second.takes(1)

    first.kill()
    daemon.until(lambda: client.stats("demo").caches[0].num_workers == 1)
    assert blocks_in_use(client, "demo") == 4
    second.kill()

    daemon.until(lambda: blocks_in_use(client, "demo") == 0)


def test_magazine_survives_the_death_of_the_control_process(
    daemon: Serving, client: Client
) -> None:
    """A restart keeps a magazine's holds, published blocks and sequence; a dead engine's blocks are gone."""
    dead = Engine(daemon, "right")
    dead.takes(5)
    with client.attach("demo", magazine="left") as worker:
        mine, keys = worker.magazine(), worker.keys.chain(list(range(64)), 16)
        blocks = mine.exchange(ExchangeOrder(take_running=6)).taken_running
        order = ExchangeOrder(publish_blocks=blocks[:4], publish_keys=keys)
        assert mine.exchange(order).published.tolist() == [1, 1, 1, 1]
        dead.process.send_signal(19)

        daemon.restart_control(worker)
        dead.kill()

        found = mine.inventory()
        assert found.blocks.tolist() == sorted(blocks.tolist())
        assert found.sequence == 2
        assert mine.exchange(ExchangeOrder(hold_keys=keys)).held.tolist() == blocks[:4].tolist()
        daemon.until(lambda: blocks_in_use(client, "demo") == 6)
        assert mine.exchange(ExchangeOrder(drop_blocks=blocks)).dropped.tolist() == [1] * 6


def test_exchange_goes_on_while_its_engine_does_something_else(client: Client) -> None:
    """The answer is asked for later; until then the magazine takes no other exchange, and other calls go on."""
    with client.attach("demo", magazine="engine") as worker:
        mine = worker.magazine()
        answer = mine.begin(ExchangeOrder(take_running=3))
        with pytest.raises(WrongStateError, match="has no answer yet"):
            mine.exchange(ExchangeOrder(take_running=1))
        assert worker.reserve("r", num_tokens=16).release()

        taken = answer().taken_running.tolist()
        assert mine.begin(ExchangeOrder(drop_blocks=taken))().dropped.tolist() == [1, 1, 1]
        assert mine.inventory().sequence == 2


def test_answer_that_nobody_asks_for_leaves_the_exchange_in_doubt(client: Client) -> None:
    """The inventory tells what became of it; the answer, if asked for after that, might be told for a second time."""
    with client.attach("demo", magazine="engine") as worker:
        mine = worker.magazine()
        mine.exchange(ExchangeOrder())
        answer = mine.begin(ExchangeOrder(take_running=2))
        worker.reserve("r", num_tokens=16).release()
        assert mine.inventory().blocks.size == 2
        with pytest.raises(WrongStateError, match="inventory was taken before"):
            answer()
        assert mine.inventory().sequence == 2

        mine.begin(ExchangeOrder(take_running=1))
        with pytest.raises(WrongStateError):
            mine.exchange(ExchangeOrder())


def test_exchange_that_is_on_its_way_outlives_the_control_process(
    daemon: Serving, client: Client
) -> None:
    """A restart breaks the connection; the answer comes from a retry of the same sequence, which does nothing twice."""
    with client.attach("demo", magazine="engine") as worker:
        mine = worker.magazine()
        mine.exchange(ExchangeOrder(take_running=1))
        answer = mine.begin(ExchangeOrder(take_running=2))

        daemon.restart_control(worker)

        assert answer().taken_running.size == 2
        assert mine.inventory().blocks.size == 3


@pytest.mark.parametrize(
    "is_killed",
    [
        pytest.param(False, id="stopped", marks=pytest.mark.thorough),
        pytest.param(True, id="killed"),
    ],
)
def test_magazine_is_new_when_the_memory_is(
    daemon: Serving, client: Client, *, is_killed: bool
) -> None:
    """After a new start of the whole daemon, nothing passes for what an engine had before, and the engine can go on.

    The worker registers the cache again by itself, because its client had registered it.
    """
    order = ExchangeOrder(take_new=3)
    with client.attach("demo", magazine="left", deadline_seconds=SECONDS) as worker:
        mine, identity = worker.magazine(), worker.memory_identity
        taken = mine.exchange(ExchangeOrder(take_running=6)).taken_running
        daemon.restart(is_killed=is_killed)

        with pytest.raises(IdReusedError, match="inventory"):
            mine.exchange(ExchangeOrder(drop_blocks=taken))
        found = mine.inventory()

        assert (found.blocks.tolist(), found.sequence) == ([], 0)
        assert worker.memory_generation == 2
        assert worker.memory_identity != identity
        assert len(mine.exchange(order).taken_new) == 3
        assert mine.inventory().sequence == 1
        assert blocks_in_use(client, "demo") == 3


def test_sequence_of_a_magazine_that_is_gone_is_stale(daemon: Serving, client: Client) -> None:
    """If the cache exists again before the engine calls, its next exchange is refused and changes nothing."""
    with client.attach("demo", magazine="left", deadline_seconds=SECONDS) as worker:
        mine = worker.magazine()
        mine.exchange(ExchangeOrder(take_running=6))
        daemon.restart(is_killed=True)
        register_again(daemon, client)

        with pytest.raises(IdReusedError, match="inventory"):
            mine.exchange(ExchangeOrder(take_new=3))

        assert mine.inventory().blocks.tolist() == []
        assert blocks_in_use(client, "demo") == 0


def test_magazines_are_listed_for_people(daemon: Serving, client: Client) -> None:
    """Each transport and the command line list the processes of a magazine, and its blocks."""
    with client.attach("demo", magazine="left") as worker:
        keys = worker.keys.chain(list(range(32)), 16)
        blocks = worker.magazine().exchange(ExchangeOrder(take_running=5)).taken_running
        order = ExchangeOrder(publish_blocks=blocks[:2], publish_keys=keys)
        worker.magazine().exchange(order)

        for scheme in ("unix", "http+unix", "grpc+unix"):
            with Client(daemon.address(scheme)) as operator:
                (one,) = operator.inspect("demo", "magazines").magazines
            assert (one.private_blocks, one.held_blocks, one.num_exchanges) == (3, 2, 2)
            assert one.worker_ids == (worker.worker_id,)
            assert (one.tenant, one.age_ms is not None) == ("default", True)
        assert one.magazine_digest in command(daemon.address("unix"), "magazines")


def test_two_engines_share_what_is_found(client: Client) -> None:
    """One engine can hold what another published; then neither can overwrite it, and a request finds it, too."""
    with (
        client.attach("demo", magazine="left") as one,
        client.attach("demo", magazine="right") as other,
    ):
        keys = one.keys.chain(list(range(64)), 16)
        mine, theirs = one.magazine(), other.magazine()
        blocks = mine.exchange(ExchangeOrder(take_running=4)).taken_running
        mine.exchange(ExchangeOrder(publish_blocks=blocks, publish_keys=keys))

        held = theirs.exchange(ExchangeOrder(hold_keys=keys, stops_at_miss=True)).held
        retracted = mine.exchange(ExchangeOrder(retract_blocks=blocks)).retracted
        lease = other.reserve("r", num_tokens=80, keys=keys)

        assert np.array_equal(held, blocks)
        assert retracted.tolist() == [2, 2, 2, 2]
        assert lease.hit_tokens == 64
        metrics = client.stats("demo").caches[0].counters
        assert metrics["exchanges"] == 4


@pytest.mark.usefixtures("client")
def test_magazine_needs_a_proof_of_death(daemon: Serving) -> None:
    """A magazine is refused over gRPC, which proves no process's death; REST and aio have the same verb."""
    grpc = Client(daemon.address("grpc+unix"), on_doubt="raise")
    with grpc, pytest.raises(WrongStateError, match="death"):
        grpc.attach("demo", magazine="left")

    async def take() -> list[int]:
        async with (
            AsyncClient(daemon.address("http+unix")) as rest,
            await rest.attach("demo", magazine="left") as worker,
        ):
            told = await worker.magazine().exchange(ExchangeOrder(take_new=2))
            assert (await worker.magazine().inventory()).sequence == 1
            return [*map(int, told.taken_new)]

    assert len(asyncio.run(take())) == 2
