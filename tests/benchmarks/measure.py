"""Own how figures are taken, in turns with their floors; the other modules own what is measured."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Final

Once = Callable[[], int]
"""Makes one call and returns its nanoseconds, without those of preparation and cleanup."""

ROUNDS: Final = 7
WARM_UP_CALLS: Final = 30
NS_PER_US: Final = 1e3
NS_PER_MS: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the table; a row without a goal is for information."""

    name: str
    ours: float
    unit: str
    floor: float | None = None
    ratio: float | None = None
    goal: str = ""
    holds: bool | None = None
    note: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the figure as plain values."""
        return asdict(self)


def in_turns(
    sides: Sequence[Once], *, calls_a_round: int, rounds: int = ROUNDS, warm_up: int = WARM_UP_CALLS
) -> list[list[float]]:
    """Return the median nanoseconds of every round of each side, the sides taking turns (A B A B)."""
    medians: list[list[float]] = [[] for _ in sides]
    with without_collector():
        for side in sides:
            for _ in range(warm_up):
                side()
        for _ in range(rounds):
            for side, found in zip(sides, medians, strict=True):
                found.append(median([side() for _ in range(calls_a_round)]))
    return medians


def median_of(once: Once, num_calls: int) -> float:
    """Return the median nanoseconds of a call."""
    with without_collector():
        return median([once() for _ in range(num_calls)])


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect garbage once, and not again until the end.

    A collection leaves a processor's caches cold for some forty calls: one before each round would affect most of its
    calls, and more so for longer code.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def at_most(name: str, ours: Sequence[float], floor: Sequence[float], *, times: float) -> Figure:
    """Return the figure of calls that may take no longer than `times` their floor.

    The ratio is the median of the rounds' own ratios, because adjacent rounds see the same machine.
    """
    ratio = paired(ours, floor)
    return Figure(
        name=name,
        ours=median(ours) / NS_PER_US,
        floor=median(floor) / NS_PER_US,
        unit="µs",
        ratio=ratio,
        goal=f"≤ {times:g} x",
        holds=ratio <= times,
    )


def paired(ours: Sequence[float], floor: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return median(one / other for one, other in zip(ours, floor, strict=True))


def known(name: str, nanoseconds: Sequence[float], note: str = "") -> Figure:
    """Return a figure without a goal."""
    return Figure(name=name, ours=median(nanoseconds) / NS_PER_US, unit="µs", note=note)
