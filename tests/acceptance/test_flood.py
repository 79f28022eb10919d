"""A tenant that floods a real daemon over several connections takes nothing from another's minimum."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvlease import Client, KVLeaseError, PlanInputs, TenantLimits, Worker
from tests.acceptance.serving import Serving, served
from tests.acceptance.test_operating import INPUTS, TOKENS_PER_BLOCK

pytestmark = pytest.mark.acceptance

MIN_BLOCKS = 8
NUM_FLOODERS = 4
ROUNDS = 120
FLOOD_CAP = 12


class Flood:
    """Workers of one tenant that take all that they can get, as fast as they can, and leave it cached."""

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
    """Whatever one tenant does, the other has its minimum at each of its requests, and the flood its cap of leases."""
    with served(tmp_path / "run") as serving, _prepared(serving) as client:
        flooders = [client.attach("main", tenant="flood") for _ in range(NUM_FLOODERS)]
        with client.attach("main", tenant="chat") as chat:
            with Flood(flooders).running() as flood:
                serving.until(lambda: flood.num_granted > NUM_FLOODERS)
                for turn in range(ROUNDS):
                    num_tokens = MIN_BLOCKS * TOKENS_PER_BLOCK
                    lease = chat.reserve(f"chat-{turn}", num_tokens=num_tokens, wait_ms=5_000)
                    assert len(lease.block_ids) == MIN_BLOCKS
                    if turn % 10 == 0:
                        _compare_tenants(client)
                    lease.release()
            for worker in flooders:
                worker.close()

        assert flood.num_granted > ROUNDS / 4
        assert flood.codes <= {"POOL_FULL", "BUSY"}


@contextmanager
def _prepared(serving: Serving) -> Iterator[Client]:
    inputs = PlanInputs(layers=INPUTS.layers, tokens_per_block=TOKENS_PER_BLOCK, device_blocks=20)
    with Client(serving.address("unix"), on_doubt="raise") as client:
        client.set_tenant("chat", TenantLimits(min_percent=100 * MIN_BLOCKS / 20), revision=1)
        client.set_tenant("flood", TenantLimits(leases_max=FLOOD_CAP, weight=1_000), revision=1)
        client.register("main", inputs)
        serving.until(lambda: client.get_cache("main").status == "ready")
        yield client


def _compare_tenants(client: Client) -> None:
    """The flood never has what the other is guaranteed, nor more leases than it may."""
    facts = {one.tenant: one for one in client.inspect("main", "tenants").tenants}
    assert facts["chat"].held_blocks == MIN_BLOCKS
    assert facts["flood"].used_blocks <= 20 - MIN_BLOCKS
    assert facts["flood"].num_leases <= FLOOD_CAP
