"""Own the counts of a cache's calls that its core does not keep: why they were refused, and how long they waited."""

from bisect import bisect_left
from collections import Counter
from time import monotonic
from typing import Final

import numpy as np

from kvlease.errors import BY_NUMBER, KVLeaseError, UnknownWorkerError
from kvleased.core.effects import Stepped

WAIT_BOUNDS_SECONDS: Final = (
    0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 600.0,
)  # fmt: skip
"""Upper bounds of the histogram of waits."""
REFUSALS_MAX: Final = 256
"""Kinds of refusals that are counted apart; all others are counted together."""
OTHER: Final = ("other", "other", "other")
UNSAID: Final = "unsaid"
"""The reason of a refusal that names neither a rule nor a resource."""
GRANTED: Final = "granted"
REFUSED: Final = "refused"
LEFT: Final = "left"
"""What became of a call that waited; LEFT if its caller had gone, or was a worker that has ended."""


class Tally:
    """The counts of one cache."""

    def __init__(self) -> None:
        """Start at zero."""
        self.refusals: Counter[tuple[str, str, str]] = Counter()
        """Refusals by verb, code and reason: the rule that was broken, or the resource that ran short."""
        self.waits: Counter[tuple[str, str]] = Counter()
        """Waits by verb and by what became of the call."""
        self.wait_counts: dict[str, list[int]] = {}
        """By verb: the waits between each bound and the one before it; the last count is of longer waits."""
        self.wait_seconds: dict[str, float] = {}
        """By verb: the sum of all waits."""

    def __repr__(self) -> str:
        """Show life."""
        return f"<Tally {self.refusals.total()} refusals, {self.waits.total()} waits>"

    def refused(self, verb: str, error: KVLeaseError) -> None:
        """Count a refused call."""
        self._count((verb, error.code, error.rule or error.resource or UNSAID), 1)

    def stepped(self, reply: Stepped) -> None:
        """Count what a step refused: its reserves, and its operations, only the first of which say why."""
        for one in reply.reserves:
            if isinstance(one, KVLeaseError):
                self.refused("step", one)
        if not reply.errors:
            return
        for _, error in reply.errors:
            self.refused("step", error)
        numbers = Counter(np.frombuffer(reply.codes, np.int32).tolist())
        numbers -= Counter(error.number for _, error in reply.errors)
        for number, count in numbers.items():
            if number:
                self._count(("step", BY_NUMBER[number].code, UNSAID), count)

    def _count(self, kind: tuple[str, str, str], count: int) -> None:
        is_known = kind in self.refusals or len(self.refusals) < REFUSALS_MAX
        self.refusals[kind if is_known else OTHER] += count

    def waits_for(self, command: object) -> "Wait":
        """Return a wait that begins now."""
        return Wait(self, verb_of(command))

    def ended(self, wait: "Wait", outcome: str) -> None:
        """Count a call that has waited."""
        seconds = monotonic() - wait.began_at
        self.waits[wait.verb, outcome] += 1
        counts = self.wait_counts.setdefault(wait.verb, [0] * (len(WAIT_BOUNDS_SECONDS) + 1))
        counts[bisect_left(WAIT_BOUNDS_SECONDS, seconds)] += 1
        self.wait_seconds[wait.verb] = self.wait_seconds.get(wait.verb, 0.0) + seconds


class Wait:
    """One call that waits."""

    __slots__ = ("_tally", "began_at", "verb")

    def __init__(self, tally: Tally, verb: str) -> None:
        """Start the clock."""
        self._tally = tally
        self.verb = verb
        self.began_at = monotonic()

    def end(self, result: object) -> None:
        """Count the wait, and the refusal if the result is one."""
        if isinstance(result, UnknownWorkerError):
            # Whether the daemon hears first that the process has ended or that its connection has is chance.
            self.leave()
        elif isinstance(result, KVLeaseError):
            self._tally.ended(self, REFUSED)
            self._tally.refused(self.verb, result)
        else:
            self._tally.ended(self, GRANTED)

    def leave(self) -> None:
        """Count the wait as one whose caller has gone."""
        self._tally.ended(self, LEFT)


def verb_of(command: object) -> str:
    """Return the verb of a command of the core: its name in lower case."""
    return type(command).__name__.lower()
