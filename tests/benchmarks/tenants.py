"""Own the figure of what timing tells a tenant: how often it guesses right whether another tenant has a prompt.

It guesses from the time of one reserve and release of that prompt. Prompts that another tenant has cached and prompts
that nobody has alternate in random order, so that both see the same machine. The figure is the chance to tell the
kinds of two calls apart by which is longer; 50 % is no better than a coin.
"""

import random
import time
from pathlib import Path
from typing import Final

import numpy as np
from calls import attached, bench_node
from measure import Figure
from node import TOKENS_PER_BLOCK
from numpy.typing import NDArray

from kvlease import Client, Worker

NUM_BLOCKS: Final = 16
NUM_TOKENS: Final = NUM_BLOCKS * TOKENS_PER_BLOCK
NUM_CALLS: Final = 6_000
WAIT_MS: Final = 1_000
"""Time to wait for blocks that are zeroed because another tenant had them."""
PERCENT_MAX: Final = 53.0
PERCENT: Final = 100.0


def tenants(directory: Path) -> list[Figure]:
    """Measure what timing tells of another tenant's prompts, beside what it tells of one's own."""
    with (
        bench_node(directory) as node,
        Client(node.local, on_doubt="raise") as operator,
        attached(node.local, tenant="holder") as holder,
        attached(node.local, tenant="curious") as curious,
    ):
        others = _told(operator, holder, curious)
        own = _told(operator, holder, holder)
    return [
        Figure(
            name="tenants: guesses from the clock whether another tenant has a prompt",
            ours=others,
            floor=PERCENT / 2,
            unit="%",
            ratio=others / (PERCENT / 2),
            goal=f"≤ {PERCENT_MAX:g} %",
            holds=others <= PERCENT_MAX,
            note="floor: a coin",
        ),
        Figure(name="the same of prompts of its own", ours=own, unit="%", note="what a hit tells"),
    ]


def _told(operator: Client, holder: Worker, curious: Worker) -> float:
    """Return how many of a hundred guesses are right, for a guesser who knows which kind takes longer."""
    coin = random.Random(0)  # noqa: S311 -- it is to be the same each time
    held: list[float] = []
    nobodys: list[float] = []
    for number in range(NUM_CALLS):
        keys = _keys(holder, 2 * number)
        with holder.reserve(
            f"held-{number}", keys=keys, num_tokens=NUM_TOKENS, wait_ms=WAIT_MS
        ) as lease:
            lease.commit(NUM_TOKENS, keys)
        is_held = coin.random() < 1 / 2
        wanted = _keys(curious, 2 * number + (not is_held))
        begun = time.perf_counter()
        asked = curious.reserve(
            f"asked-{number}", keys=wanted, num_tokens=NUM_TOKENS, wait_ms=WAIT_MS
        )
        asked.release()
        (held if is_held else nobodys).append(time.perf_counter() - begun)
        operator.evict(num_blocks=NUM_BLOCKS)
    chance = _chance(np.array(held), np.array(nobodys))
    return PERCENT * max(chance, 1 - chance)


def _chance(shorter: NDArray[np.float64], longer: NDArray[np.float64]) -> float:
    """Return the chance that a draw from `shorter` is below one from `longer`; ties count half."""
    ranked = np.sort(longer)
    below, up_to = (
        np.searchsorted(ranked, shorter, "left"),
        np.searchsorted(ranked, shorter, "right"),
    )
    return 1 - float((below + up_to).mean()) / 2 / len(longer)


def _keys(worker: Worker, prompt: int) -> bytes:
    tokens = np.arange(NUM_TOKENS, dtype=np.int32) + prompt * NUM_TOKENS
    return worker.keys.chain(tokens, TOKENS_PER_BLOCK)
