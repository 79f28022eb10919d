"""What tests of lower tiers share: prompts whose blocks can be checked, and views of processes and tiers."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvlease import CacheOptions, Client, FullAttention, Lease, PlanInputs, Worker
from kvlease.disk_file import bytes_per_charged_slot
from kvlease.units import BYTES_PER_SECTOR
from tests.acceptance.serving import DEADLINE_SECONDS, SECONDS_TO_START, Serving, pool_of

TOKENS_PER_BLOCK = 16
CACHE = "tiered"
WRITE_THROUGH = CacheOptions(write_policy="write-through")
WAIT_MS = int(SECONDS_TO_START * 500)


def disk_bytes_of(num_slots: int, bytes_per_slot: int) -> int:
    """Return the disk_bytes for which a store of exactly so many slots is planned."""
    if not num_slots:
        return 0
    return BYTES_PER_SECTOR + num_slots * bytes_per_charged_slot(bytes_per_slot)


def inputs_of(
    *, device_blocks: int = 64, host_slots: int = 64, disk_slots: int = 0, remote: bool = False
) -> PlanInputs:
    """Return a cache of 4 KiB blocks with the given tiers."""
    layer = FullAttention(name="layer", num_kv_heads=2, head_size=16, dtype="float32")
    bytes_per_block = TOKENS_PER_BLOCK * 2 * 2 * 16 * 4
    return PlanInputs(
        layers=(layer,),
        tokens_per_block=TOKENS_PER_BLOCK,
        device_blocks=device_blocks,
        host_bytes=host_slots * bytes_per_block,
        disk_bytes=disk_bytes_of(disk_slots, bytes_per_block),
        remote_bytes=(1 << 20) if remote else 0,
        model_digest="a model of tests",
    )


def prompt(number: int, num_blocks: int) -> NDArray[np.int32]:
    """Return the tokens of one of many prompts that share no block."""
    tokens = np.arange(num_blocks * TOKENS_PER_BLOCK, dtype=np.int32)
    return tokens + number * 1_000_003


def compute(worker: Worker, tokens: NDArray[np.int32]) -> Lease:
    """Reserve a prompt, write its keys into the missed blocks, check the hit ones, and commit."""
    keys = worker.keys.chain(tokens, TOKENS_PER_BLOCK)
    name = f"request-{int(tokens[0])}-{os.urandom(4).hex()}"
    lease = worker.reserve(name, keys=keys, num_tokens=len(tokens), wait_ms=WAIT_MS)
    rows, wanted = pool_of(worker)[lease.block_ids], contents(worker, keys)
    num_hits = lease.hit_tokens // TOKENS_PER_BLOCK
    assert (rows[:num_hits] == wanted[:num_hits]).all(), "a block that was served holds other bytes"
    pool_of(worker)[lease.block_ids[num_hits:]] = wanted[num_hits:]
    lease.commit(len(tokens), keys)
    return lease


def contents(worker: Worker, keys: bytes) -> NDArray[np.uint8]:
    """Return the expected contents of the keys' blocks: each key again and again."""
    rows = np.frombuffer(keys, np.uint8).reshape(-1, 32)
    return np.tile(rows, (1, worker.plan.bytes_per_block // 32))


@contextmanager
def attached(
    serving: Serving, plan: PlanInputs, options: CacheOptions = WRITE_THROUGH, cache: str = CACHE
) -> Iterator[tuple[Client, Worker]]:
    """Register the cache if needed, and give a client and a worker of it."""
    with Client(
        serving.address("unix"), deadline_seconds=DEADLINE_SECONDS, on_doubt="raise"
    ) as client:
        client.register(cache, plan, options)
        serving.until(lambda: client.get_cache(cache).status == "ready")
        with client.attach(cache) as worker:
            yield client, worker


def ready(client: Client, tier: str, cache: str = CACHE) -> int:
    """Count the findable blocks of a tier."""
    pools = client.stats(cache).caches[0].pools
    return next((pool.ready for pool in pools if pool.tier == tier), 0)


def counter(client: Client, name: str) -> int:
    """Return one of the cache's counters."""
    return client.stats(CACHE).caches[0].counters.get(name, 0)


def status(client: Client, tier: str, cache: str = CACHE) -> str:
    """Return the status of a tier."""
    return next(one.status for one in client.get_cache(cache).tiers if one.tier == tier)


def reason(client: Client, tier: str) -> str:
    """Return why a tier does not work, or an empty string."""
    return next(one.reason for one in client.get_cache(CACHE).tiers if one.tier == tier)


def child_or_none(serving: Serving, role: str) -> int | None:
    """Return the process id of one of the daemon's children, if it lives."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if role.encode() in arguments and parent == serving.process.pid:
            return int(entry.name)
    return None


def child(serving: Serving, role: str) -> int:
    """Return the process id of one of the daemon's children, which must live."""
    process_id = child_or_none(serving, role)
    assert process_id is not None, f"there is no {role}"
    return process_id


def kill_all(serving: Serving) -> None:
    """Kill the supervisor; the kernel then kills all processes that it started."""
    serving.process.send_signal(signal.SIGKILL)
    serving.process.wait()
    serving.log.close()
