"""What the processes of a soak share: cache, prompts, expected content of blocks, and a board of counters."""

import hashlib
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease import CacheOptions, EngineInputs, FullAttention, PlanInputs, SlidingWindow
from kvlease.errors import BY_CODE
from kvlease.ids import BYTES_PER_KEY
from tests.acceptance.tiering import disk_bytes_of

CACHE: Final = "soaked"
TOKENS_PER_BLOCK: Final = 16
DEADLINE_SECONDS: Final = 5.0
"""Deadline of each call of a worker, beyond the time that the daemon may wait."""
POLICIES: Final = ("leaf-lru", "arc", "s3-fifo", "lfu")
WRITE_POLICIES: Final = ("write-through", "on-evict", "after-n-hits")
_NUM_CONVERSATIONS: Final = 32
_NUM_SYSTEMS: Final = 4
_SYSTEM_TOKENS: Final = 2 * TOKENS_PER_BLOCK
_TOKENS_MAX: Final = 14 * TOKENS_PER_BLOCK
_RAMP_STEP: Final = np.uint64(0x9E37_79B9_7F4A_7C15)

COUNTED: Final = (
    "calls",
    "requests",
    "verified_blocks",
    "wrong_blocks",
    "device_hits",
    "host_hits",
    "disk_hits",
    "remote_hits",
    "computed",
    "evictions",
    "reloads",
    "forks",
    "grown",
    "abandoned",
    "lost_answers",
    "ended_leases",
    *BY_CODE,
)
"""What each worker counts."""
_TIMES: Final = ("answer_due_at",)
"""Monotonic nanoseconds by which the current call must have ended; 0 if there is none."""


class Board:
    """Counters of all workers, in a file so that the counts of a killed worker stay."""

    def __init__(self, path: Path, num_workers: int) -> None:
        """Open the file, or make it."""
        width = len(COUNTED) + len(_TIMES)
        if not path.exists():
            path.write_bytes(bytes(8 * width * num_workers))
        self._rows = np.memmap(path, np.int64, "r+", shape=(num_workers, width))
        self._column = {name: at for at, name in enumerate((*COUNTED, *_TIMES))}

    def add(self, worker: int, name: str, amount: int = 1) -> None:
        """Count something."""
        self._rows[worker, self._column[name]] += amount

    def set(self, worker: int, name: str, value: int) -> None:
        """Note a time."""
        self._rows[worker, self._column[name]] = value

    def get(self, worker: int, name: str) -> int:
        """Return one number."""
        return int(self._rows[worker, self._column[name]])

    def totals(self) -> dict[str, int]:
        """Return the sums over all workers."""
        sums = self._rows.sum(axis=0)
        return {name: int(sums[self._column[name]]) for name in COUNTED}


def inputs_of(*, is_hybrid: bool) -> PlanInputs:
    """Return a cache of 4 KiB blocks whose working set fits no tier, and the remote store only nearly."""
    full = FullAttention(name="full", num_kv_heads=2, head_size=16, dtype="float32")
    window = SlidingWindow(
        name="window", num_kv_heads=2, head_size=16, dtype="float32", window_tokens=64
    )
    return PlanInputs(
        layers=(full, window) if is_hybrid else (full,),
        tokens_per_block=TOKENS_PER_BLOCK,
        device_blocks=96 if is_hybrid else 64,
        null_blocks=1 if is_hybrid else 0,
        host_bytes=48 * 4096,
        disk_bytes=disk_bytes_of(160, 4096),
        remote_bytes=1 << 22,
        model_digest="a model of soaks",
        longest_request_tokens=1024,
        engine=EngineInputs(tokens_per_step=64),
    )


def options_of(seed: int) -> CacheOptions:
    """Return the options of a soak's cache."""
    return CacheOptions(
        write_policy=WRITE_POLICIES[seed // 2 % len(WRITE_POLICIES)],
        eviction_policy=POLICIES[seed % len(POLICIES)],
    )


def next_turn(rng: np.random.Generator) -> NDArray[np.int32]:
    """Return a prompt: a random turn of a random conversation; prefixes are shared by turns and by conversations."""
    conversation = int(rng.integers(_NUM_CONVERSATIONS))
    system = np.random.default_rng([1, conversation % _NUM_SYSTEMS])
    rest = np.random.default_rng([2, conversation])
    tokens = np.concatenate(
        [
            system.integers(0, 50_000, _SYSTEM_TOKENS, np.int32),
            rest.integers(0, 50_000, _TOKENS_MAX - _SYSTEM_TOKENS, np.int32),
        ]
    )
    num_tokens = int(rng.integers(_SYSTEM_TOKENS, _TOKENS_MAX))
    return tokens[: num_tokens - num_tokens % int(rng.choice([1, 16]))]


def image_of(key: bytes, group: int, num_bytes: int) -> NDArray[np.uint8]:
    """Return the bytes that a block of a group must hold: its key again and again, each time disguised."""
    words = np.resize(np.frombuffer(key, "<u8"), num_bytes // 8)
    return (words ^ _ramp(group, num_bytes)).view(np.uint8)


def key_in(image: NDArray[np.uint8], group: int) -> str:
    """Describe, for people, whose bytes a wrong block holds."""
    words = image.view("<u8") ^ _ramp(group, len(image))
    keys, counts = np.unique(words.reshape(-1, 4), axis=0, return_counts=True)
    best = counts.argmax()
    return f"{keys[best].tobytes().hex()} in {counts[best]} of {counts.sum()} places"


def tail_key(name: str) -> bytes:
    """Return a stand-in for the key of a block that has none yet."""
    return hashlib.sha256(name.encode()).digest()[:BYTES_PER_KEY]


def _ramp(group: int, num_bytes: int) -> NDArray[np.uint64]:
    places = np.arange(num_bytes // 8, dtype=np.uint64)
    return (places + np.uint64(group << 32)) * _RAMP_STEP
