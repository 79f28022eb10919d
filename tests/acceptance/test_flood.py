"""A tenant that floods a real daemon over several connections takes nothing from another's minimum."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from kvlease import (
    BusyError,
    Client,
    KVLeaseError,
    PlanInputs,
    PoolFullError,
    TenantLimits,
    Worker,
)
from tests.acceptance.serving import Serving, served
from tests.acceptance.test_operating import INPUTS, TOKENS_PER_BLOCK

pytestmark = pytest.mark.acceptance

MIN_BLOCKS = 8
NUM_FLOODERS = 4
ROUNDS = 120
FLOOD_CAP = 12

T = TypeVar("T")


class Flood:
    """Workers of one tenant that take all they can get as fast as they can, and leave it cached."""

    def __init__(self, workers: list[Worker]) -> None:
        self.is_over = threading.Event()
        self.num_granted = 0
        self.num_refused = 0
        self.codes: set[str] = set()
        self._threads = [
            threading.Thread(target=self._run, args=(number, worker), daemon=True)
            for number, worker in enumerate(workers)
        ]

    @contextmanager
    def running(self) -> Iterator["Flood"]:
        """Flood until the block ends."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self.is_over.set()
            for thread in self._threads:
                thread.join(30)

    def _run(self, number: int, worker: Worker) -> None:
        turn = 0
        while not self.is_over.is_set():
            turn += 1
            num_tokens = (1 + turn % 7) * TOKENS_PER_BLOCK
            keys = worker.keys.chain([number * 1_000_000 + turn] * num_tokens, TOKENS_PER_BLOCK)
            try:
                lease = worker.reserve(
                    f"flood-{number}-{turn}",
                    keys=keys,
                    num_tokens=num_tokens,
                    wait_ms=turn % 3 * 20,
                )
                lease.commit(num_tokens, keys)
                lease.release()
                self.num_granted += 1
            except KVLeaseError as error:
                self.num_refused += 1
                self.codes.add(error.code)


def test_flood_of_one_tenant_takes_nothing_from_the_minimum_of_another(tmp_path: Path) -> None:
    """Whatever one tenant does, each request of the other gets its minimum, and the flood keeps its cap of leases."""
    with served(tmp_path / "run") as serving, _prepared(serving) as client:
        flooders = [client.attach("main", tenant="flood") for _ in range(NUM_FLOODERS)]
        with client.attach("main", tenant="chat") as chat:
            with Flood(flooders).running() as flood:
                serving.until(lambda: flood.num_granted > NUM_FLOODERS)
                for turn in range(ROUNDS):
                    num_tokens = MIN_BLOCKS * TOKENS_PER_BLOCK
                    lease = chat.reserve(f"chat-{turn}", num_tokens=num_tokens, wait_ms=20_000)
                    assert len(lease.block_ids) == MIN_BLOCKS
                    if turn % 10 == 0:
                        _compare_tenants(client)
                    lease.release()
            for worker in flooders:
                worker.close()

        assert flood.num_granted > ROUNDS / 4
        assert flood.codes <= {"POOL_FULL", "BUSY"}


def test_flood_of_rows_and_pins_shuts_nobody_out(tmp_path: Path) -> None:
    """Many one-token leases and one-key pins leave the other tenant its allowance of rows and pins."""
    options = ("--max-leases", "20", "--max-pins", "20")
    with served(tmp_path / "run", *options) as serving, _prepared(serving, cap=0) as client:
        flood = client.attach("main", tenant="flood")
        with client.attach("main", tenant="chat") as chat:
            keys = _cached(flood)
            pins = _all_of(lambda _: flood.pin(keys))
            leases = _all_of(lambda number: flood.reserve(f"flood-{number}", num_tokens=1))

            own = [
                chat.reserve(f"chat-{number}", num_tokens=1, wait_ms=20_000)
                for number in range(MIN_BLOCKS)
            ]
            for lease in own:
                lease.release()
            kept = _cached(chat)
            assert [chat.pin(kept).num_blocks for _ in range(MIN_BLOCKS)] == [1] * MIN_BLOCKS
        flood.close()

    assert len(leases) == len(pins) == 20 - MIN_BLOCKS - (20 - MIN_BLOCKS) // 2 // 2


def test_flood_of_workers_shuts_nobody_out(tmp_path: Path) -> None:
    """However many workers one tenant attaches, the other finds the worker places that its minimum keeps."""
    options = ("--max-workers", "16")
    with served(tmp_path / "run", *options) as serving, _prepared(serving) as client:
        flooders = _all_of(lambda _: client.attach("main", tenant="flood"))

        others = [client.attach("main", tenant="chat") for _ in range(4)]

        assert len(flooders) == 16 - 4 - 2
        for worker in (*flooders, *others):
            worker.close()


def _all_of(take: Callable[[int], T]) -> list[T]:
    """Take until something is refused; return all that was taken."""
    found: list[T] = []
    with suppress(PoolFullError, BusyError):
        while True:
            found.append(take(len(found)))
    return found


def _cached(worker: Worker) -> bytes:
    """Leave one block cached, and return its key."""
    keys = worker.keys.chain(range(TOKENS_PER_BLOCK), TOKENS_PER_BLOCK)
    lease = worker.reserve("cached", keys=keys, num_tokens=TOKENS_PER_BLOCK)
    lease.commit(TOKENS_PER_BLOCK, keys)
    lease.release()
    return keys


@contextmanager
def _prepared(serving: Serving, cap: int = FLOOD_CAP) -> Iterator[Client]:
    inputs = PlanInputs(layers=INPUTS.layers, tokens_per_block=TOKENS_PER_BLOCK, device_blocks=20)
    with Client(serving.address("unix"), on_doubt="raise") as client:
        client.set_tenant("chat", TenantLimits(min_percent=100 * MIN_BLOCKS / 20), revision=1)
        client.set_tenant("flood", TenantLimits(leases_max=cap, weight=1_000), revision=1)
        client.register("main", inputs)
        serving.until(lambda: client.get_cache("main").status == "ready")
        yield client


def _compare_tenants(client: Client) -> None:
    """Check that the flood takes nothing of the other's guarantee, and no more leases than its cap."""
    facts = {one.tenant: one for one in client.inspect("main", "tenants").tenants}
    assert facts["chat"].held_blocks == MIN_BLOCKS
    assert facts["flood"].used_blocks <= 20 - MIN_BLOCKS
    assert facts["flood"].num_leases <= FLOOD_CAP
