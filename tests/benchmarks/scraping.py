"""Own the figures of a scrape: its time over a large cache, and how late the loop's ticks are meanwhile."""

import os
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

import cores
import numpy as np
from lag import Notes
from measure import NS_PER_MS, Figure
from node import TOKENS_PER_BLOCK, Node, UnixHttp

from kvlease import Client, Lease, Worker

CACHE: Final = "bench"
NUM_BLOCKS: Final = 100_000
NUM_TENANTS: Final = 50
NUM_LEASES: Final = 200
BLOCKS_A_LEASE: Final = 20
BYTES_PER_KEY: Final = 32
SCRAPES: Final = 40
SCRAPE_MS_MAX: Final = 50.0
STALL_MS_MAX: Final = 5.0
MS_PER_SECOND: Final = 1e3


def scraping(directory: Path) -> list[Figure]:
    """Measure scrapes of a full cache with the mixed blocks of many tenants, and live leases."""
    notes = Notes(directory / "ticks")
    with ExitStack() as stack:
        stack.enter_context(cores.awake())
        with notes.noted():
            node = stack.enter_context(Node(directory / "node"))
        node.register(CACHE, bytes_per_token=4, num_blocks=NUM_BLOCKS, num_slots=NUM_BLOCKS // 2)
        client = stack.enter_context(Client(node.local, deadline_seconds=20, on_doubt="raise"))
        workers = [
            stack.enter_context(client.attach(CACHE, tenant=f"tenant-{number}"))
            for number in range(NUM_TENANTS)
        ]
        _fill(workers)
        node.wait_idle()
        http = UnixHttp(node.http_socket)
        taken, stalls, idle = [], [], []
        num_bytes = 0
        for _ in range(SCRAPES):
            idle.append(max(notes.during(lambda: time.sleep(0.05)), default=0.0))
            began = time.perf_counter_ns()
            text: list[bytes] = []
            late = notes.during(lambda: text.append(_get(http)))  # noqa: B023 - it is called at once
            taken.append((time.perf_counter_ns() - began) / NS_PER_MS)
            stalls.append(float(np.max(late, initial=0.0)) * MS_PER_SECOND)
            num_bytes = len(text[0])
        http.close()
    what = f"scrape: {NUM_BLOCKS} blocks, {NUM_TENANTS} tenants, {NUM_LEASES} leases"
    return [
        Figure(
            name=f"{what}, over the Unix socket",
            ours=median(taken),
            unit="ms",
            goal=f"≤ {SCRAPE_MS_MAX:g} ms",
            holds=median(taken) <= SCRAPE_MS_MAX,
            note=f"{num_bytes} bytes of text; the slowest of {SCRAPES} took {max(taken):.1f} ms",
        ),
        Figure(
            name=f"{what}: the latest that the loop heard a clock, median of {SCRAPES} scrapes",
            ours=median(stalls),
            floor=median(idle) * MS_PER_SECOND,
            unit="ms",
            goal=f"≤ {STALL_MS_MAX:g} ms",
            holds=median(stalls) <= STALL_MS_MAX,
            note=f"the worst of all was {max(stalls):.1f} ms; floor: the same loop with nothing asked of it",
        ),
    ]


def _fill(workers: list[Worker]) -> None:
    """Fill the cache with blocks of all tenants, no two neighbours of the same tenant, and keep some leases."""
    kept: list[Lease] = []
    num_rounds = NUM_BLOCKS // BLOCKS_A_LEASE // len(workers) + 1
    for number in range(num_rounds):
        for worker in workers:
            keys = os.urandom(BLOCKS_A_LEASE * BYTES_PER_KEY)
            num_tokens = BLOCKS_A_LEASE * TOKENS_PER_BLOCK
            lease = worker.reserve(f"{number}", keys=keys, num_tokens=num_tokens)
            lease.commit(num_tokens, keys)
            if number >= num_rounds - NUM_LEASES // len(workers):
                kept.append(lease)
            else:
                lease.release()
    assert len(kept) == NUM_LEASES, "as many leases live as are spoken of"


def _get(http: UnixHttp) -> bytes:
    http.request("GET", "/metrics")
    return http.getresponse().read()
