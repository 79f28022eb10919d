"""Own the figures of hashing: a prompt's keys beside the bare hashing, and beside vLLM's.

The first floor is one blake3 call a block over the same bytes, packed and cut beforehand; the second runs in a
process of its own, round by round in turns with ours, on the same token ids.
"""

import os
import subprocess
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Final

import numpy as np
from blake3 import blake3
from measure import Figure, in_turns, median_of, paired
from reference import NO_FLOOR, REFERENCE, ROOT

from kvlease.ids import BYTES_PER_KEY
from kvlease.keys import BlockKeys

TOKENS_PER_BLOCK: Final = 16
BYTES_PER_TOKEN: Final = 4
CALLS: Final = {1_024: 100, 8_192: 30, 131_072: 5}
"""Tokens of a prompt, and how often the prompt is hashed in a round."""
ROUNDS: Final = 7
TIMES_OF_HASHING_MAX: Final = 1.5
TIMES_FASTER_MIN: Final = 2
VOCABULARY: Final = 128_000
TENANT_KEY: Final = bytes(range(32))


def keys(directory: Path) -> list[Figure]:  # noqa: ARG001 - every benchmark gets one
    """Measure prompts of each size, as a list and as an array, then a request that decodes."""
    figures = [figure for num_tokens in CALLS for figure in _beside_hashing(num_tokens)]
    return [*figures, *_beside_reference(), _decoding()]


class Prompt:
    """The token ids of one prompt, as a list and as an array."""

    def __init__(self, num_tokens: int) -> None:
        """Make up the tokens; a longer prompt begins with a shorter one's."""
        self.tokens = np.random.default_rng(1).integers(0, VOCABULARY, num_tokens, np.int32)
        self.listed = self.tokens.tolist()
        self._naming = BlockKeys(TENANT_KEY, "layout", "model")
        self._steps = self._cut()

    def hash_list(self) -> int:
        """Hash token ids in a list, as engines hold them."""
        start = perf_counter_ns()
        self._naming.chain(self.listed, TOKENS_PER_BLOCK)
        return perf_counter_ns() - start

    def hash_array(self) -> int:
        """Hash token ids in an array."""
        start = perf_counter_ns()
        self._naming.chain(self.tokens, TOKENS_PER_BLOCK)
        return perf_counter_ns() - start

    def hash_bare(self) -> int:
        """Hash the bytes behind the keys, block by block, and nothing else."""
        start = perf_counter_ns()
        for step in self._steps:
            blake3(step, key=TENANT_KEY).digest()
        return perf_counter_ns() - start

    def _cut(self) -> list[bytes]:
        """Return the bytes that are hashed for each block: its parent's key and its tokens."""
        chain = self._naming.root + self._naming.chain(self.tokens, TOKENS_PER_BLOCK)
        packed, bytes_per_block = self.tokens.tobytes(), TOKENS_PER_BLOCK * BYTES_PER_TOKEN
        return [
            chain[block * BYTES_PER_KEY : (block + 1) * BYTES_PER_KEY]
            + packed[block * bytes_per_block : (block + 1) * bytes_per_block]
            for block in range(len(self.tokens) // TOKENS_PER_BLOCK)
        ]


def _beside_hashing(num_tokens: int) -> list[Figure]:
    prompt = Prompt(num_tokens)
    sides = (prompt.hash_list, prompt.hash_array, prompt.hash_bare)
    listed, arrays, bare = in_turns(sides, calls_a_round=CALLS[num_tokens])
    return [
        _figure(f"{num_tokens} tokens in {held}", num_tokens, ours, bare)
        for held, ours in (("a list", listed), ("an array", arrays))
    ]


def _figure(what: str, num_tokens: int, ours: list[float], bare: list[float]) -> Figure:
    num_blocks = num_tokens // TOKENS_PER_BLOCK
    ratio = paired(ours, bare)
    return Figure(
        name=f"keys: {what}, per block",
        ours=median(ours) / num_blocks,
        floor=median(bare) / num_blocks,
        unit="ns",
        ratio=ratio,
        goal=f"≤ {TIMES_OF_HASHING_MAX:g} x",
        holds=ratio <= TIMES_OF_HASHING_MAX,
        note="floor: blake3 of the same bytes",
    )


def _beside_reference() -> list[Figure]:
    """Return the figures of lists beside vLLM's sha256; the first round of either side only warms up."""
    if not REFERENCE.exists():
        return [_beside(num_tokens, [Prompt(num_tokens).hash_list()], []) for num_tokens in CALLS]
    with subprocess.Popen(
        [REFERENCE, ROOT / "tests" / "vllm" / "keys.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    ) as process:
        figures = []
        for num_tokens, num_calls in CALLS.items():
            prompt = Prompt(num_tokens)
            ours, floor = [], []
            for _ in range(1 + ROUNDS):
                ours.append(median_of(prompt.hash_list, num_calls))
                floor.append(_floor_of(process, num_tokens))
            figures.append(_beside(num_tokens, ours[1:], floor[1:]))
    return figures


def _floor_of(process: subprocess.Popen[str], num_tokens: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{num_tokens} {CALLS[num_tokens]}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def _beside(num_tokens: int, ours: list[float], floor: list[float]) -> Figure:
    name = f"keys: {num_tokens} tokens beside vLLM, per block"
    num_blocks = num_tokens // TOKENS_PER_BLOCK
    if not floor:
        return Figure(name=name, ours=median(ours) / num_blocks, unit="ns", note=NO_FLOOR)
    ratio = paired(ours, floor)
    return Figure(
        name=name,
        ours=median(ours) / num_blocks,
        floor=median(floor) / num_blocks,
        unit="ns",
        ratio=ratio,
        goal=f"≤ 1/{TIMES_FASTER_MIN}",
        holds=ratio <= 1 / TIMES_FASTER_MIN,
        note=f"{1 / ratio:.1f} times faster",
    )


def _decoding() -> Figure:
    """Return the cost of a growing request's tokens, one by one."""
    prompt = Prompt(min(CALLS))
    single = [[token] for token in prompt.listed]
    naming = BlockKeys(TENANT_KEY, "layout", "model")

    def decode() -> int:
        chain = naming.grow(TOKENS_PER_BLOCK)
        start = perf_counter_ns()
        for token in single:
            chain.append(token)
        return perf_counter_ns() - start

    (taken,) = in_turns([decode], calls_a_round=CALLS[min(CALLS)])
    return Figure(
        name="keys: a token that is appended, its share of a block's key included",
        ours=median(taken) / len(single),
        unit="ns",
    )
