"""Sweep over every system call of a disk mover: `make sweep POINTS=n`; or one world again: `--seed N`.

At each point one call fails, or the process is killed there, and the next mover must have all that was acknowledged.
Ends with exit code 1 if anything was lost, leaked or served wrong.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from tests.laws.sweep_bugs import BUGS
from tests.laws.sweep_points import judge, points_of, world_of
from tests.laws.sweep_server import SYSCALLS, ForkServer, why_not

_IN_MEMORY: Final = Path("/dev/shm")
"""The place where a small store costs least; the order of writes is the same there."""


@dataclass(slots=True)
class Tally:
    """The results of some points."""

    points: int = 0
    kills: int = 0
    lost: int = 0
    leaked: int = 0
    wrong: int = 0
    torn: int = 0
    raised: int = 0
    broken: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the counts of another tally."""
        self.points += other.points
        self.kills += other.kills
        self.lost += other.lost
        self.leaked += other.leaked
        self.wrong += other.wrong
        self.torn += other.torn
        self.raised += other.raised
        self.broken += other.broken

    def __str__(self) -> str:
        return (
            f"{self.points:,} points ({self.kills:,} kills)  lost {self.lost}  "
            f"leaked {self.leaked}  wrong {self.wrong}  torn {self.torn}  raised {self.raised}"
        )


def sweep_world(
    seed: int, syscalls: Sequence[str] = SYSCALLS, *, stops_early: bool = False
) -> Tally:
    """Try every fault of one world, perhaps only until something breaks."""
    tally, world = Tally(), world_of(seed)
    # Each mover collects its own garbage, and not that of the process that it was forked from.
    gc.freeze()
    parent = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvlease-sweep-", dir=parent) as name:
        directory = Path(name)
        template = directory / "template"
        world.furnish(template)
        with ForkServer(directory) as server:
            for point in list(points_of(world, server, template, syscalls)):
                verdict = judge(world, point, server, template)
                tally.points += verdict.was_hit
                tally.kills += verdict.was_hit and point.is_kill
                tally.lost += verdict.lost
                tally.leaked += verdict.leaked
                tally.wrong += verdict.wrong
                tally.torn += verdict.torn
                tally.raised += verdict.raised
                if not verdict.is_good:
                    tally.broken.append(f"--seed {seed}  {point}: {'; '.join(verdict.notes)}")
                    if stops_early:
                        break
    return tally


def sweep(points_min: int) -> Tally:
    """Try the faults of one world after another, on all cores, until there were so many points."""
    tally = Tally()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for part in _swept(pool, points_min):
            tally.add(part)
            _say(str(tally))
            for broken in part.broken:
                _say(broken)
    return tally


def _swept(pool: ProcessPoolExecutor, points_min: int) -> Iterator[Tally]:
    seeds, num_points = count(), 0
    running: set[Future[Tally]] = set()
    while running or num_points < points_min:
        while len(running) < (os.cpu_count() or 1) and num_points < points_min:
            running.add(pool.submit(sweep_world, next(seeds)))
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for one in done:
            part = one.result()
            num_points += part.points
            yield part


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Sweep, and print the results."""
    parser = argparse.ArgumentParser(
        description="Sweep faults over the system calls of a disk mover."
    )
    parser.add_argument("--points", type=int, default=2_000, help="points at least")
    parser.add_argument("--seed", type=int, help="this world alone")
    parser.add_argument("--syscalls", default=",".join(SYSCALLS), help="of that world")
    parser.add_argument("--bug", choices=BUGS, help="switch a bug on, which must be found there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvlease-sweep-") as directory:
        if reason := why_not(Path(directory)):
            _say(f"nothing was swept: {reason}")
            return 2
    start = time.monotonic()
    if arguments.seed is None:
        tally = sweep(arguments.points)
    else:
        if arguments.bug:
            BUGS[arguments.bug]()
        syscalls = arguments.syscalls.split(",")
        tally = sweep_world(arguments.seed, syscalls, stops_early=bool(arguments.bug))
    for broken in tally.broken:
        _say(broken)
    _say(f"{tally}  in {time.monotonic() - start:.0f} s")
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
