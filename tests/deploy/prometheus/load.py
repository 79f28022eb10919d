"""Own a load that moves all metrics: tiers, tenants, refusals, waits, regrets, ghosts, magazines."""

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease import (
    CacheOptions,
    Client,
    ExchangeOrder,
    FullAttention,
    KVLeaseError,
    Lease,
    PlanInputs,
    Worker,
)
from tests.acceptance.serving import Serving
from tests.acceptance.tiering import disk_bytes_of

CACHE: Final = "main"
TOKENS_PER_BLOCK: Final = 16
BYTES_PER_BLOCK: Final = TOKENS_PER_BLOCK * 2 * 2 * 16 * 4
DEVICE_BLOCKS: Final = 65
HOST_SLOTS: Final = 48
DISK_SLOTS: Final = 200
LEASES_KEPT: Final = 6
PAUSE_SECONDS: Final = 0.01
_INPUTS: Final = PlanInputs(
    layers=(FullAttention(name="layer", num_kv_heads=2, head_size=16, dtype="float32"),),
    tokens_per_block=TOKENS_PER_BLOCK,
    device_blocks=DEVICE_BLOCKS,
    null_blocks=1,
    host_bytes=HOST_SLOTS * BYTES_PER_BLOCK,
    disk_bytes=disk_bytes_of(DISK_SLOTS, BYTES_PER_BLOCK),
    model_digest="a model of tests",
)
_OPTIONS: Final = CacheOptions(write_policy="write-through", ghosts=("leaf-lru@130", "adaptive"))


@contextlib.contextmanager
def loaded(serving: Serving) -> Iterator[None]:
    """Keep a daemon busy during the context."""
    ended = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            _run(serving, ended)
        except BaseException as failure:  # noqa: BLE001 - told to whoever waits
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not failures, failures


def _run(serving: Serving, ended: threading.Event) -> None:
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(serving.address("unix"), on_doubt="raise"))
        client.register(CACHE, _INPUTS, _OPTIONS)
        while client.get_cache(CACHE).status != "ready":
            time.sleep(PAUSE_SECONDS)
        workers = [
            stack.enter_context(client.attach(CACHE, tenant=tenant)) for tenant in ("chat", "batch")
        ]
        engine = stack.enter_context(client.attach(CACHE, tenant="chat", magazine="engine"))
        engine.magazine().exchange(ExchangeOrder(take_running=2))
        requests = [_Requests(worker, seed) for seed, worker in enumerate(workers)]
        while not ended.is_set():
            for one in requests:
                one.go_on()
            ended.wait(PAUSE_SECONDS)
        for one in requests:
            one.end()


class _Requests:
    """The requests of one worker: a few repeated prompts with more blocks than device and host have."""

    def __init__(self, worker: Worker, seed: int) -> None:
        self._worker = worker
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._kept: deque[Lease] = deque()
        self._number = 0

    def go_on(self) -> None:
        """Serve one request, and end the oldest; now and then make a call that is refused or moves a lease."""
        self._number += 1
        tokens = _prompt(int(self._random.expovariate(0.1)) % 40, self._random.randint(3, 6))
        try:
            self._serve(tokens)
            if self._number % 20 == 0:
                self._kept[-1].evict()
                self._kept[-1].reload()
            if self._number % 25 == 0:
                self._ask(f"large-{self._number}", 60, 0)
            if self._number % 40 == 0:
                self._ask(f"patient-{self._number}", 60, 30)
            if self._number % 30 == 0:
                self._ask(f"huge-{self._number}", 10_000, 0)
        except KVLeaseError:
            self.end()
        while len(self._kept) > LEASES_KEPT:
            self._kept.popleft().release()

    def _serve(self, tokens: NDArray[np.int32]) -> None:
        keys = self._worker.keys.chain(tokens, TOKENS_PER_BLOCK)
        wait_ms = 2_000 if self._number % 3 else 0
        name = f"request-{self._number}"
        lease = self._worker.reserve(name, keys=keys, num_tokens=len(tokens) + 5, wait_ms=wait_ms)
        self._kept.append(lease)
        lease.commit(len(tokens), keys)

    def _ask(self, name: str, num_blocks: int, wait_ms: int) -> None:
        self._worker.reserve(
            name, num_tokens=num_blocks * TOKENS_PER_BLOCK, wait_ms=wait_ms
        ).release()

    def end(self) -> None:
        """Release all leases."""
        while self._kept:
            with contextlib.suppress(KVLeaseError):
                self._kept.popleft().release()


def _prompt(number: int, num_blocks: int) -> NDArray[np.int32]:
    return np.arange(num_blocks * TOKENS_PER_BLOCK, dtype=np.int32) + number * 1_000_003
