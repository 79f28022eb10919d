"""Simulate on all cores until time is up: `make sim MINUTES=n`; or replay one history: `--seed N`.

A run plays all seeds from a first one on, which is random unless it is given, up to one that it names at the end.
Another run can go on from there, so that several runs add up. Exits with code 1 if a law was broken.
"""

import argparse
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from itertools import count
from threading import Event
from types import FrameType
from typing import Final

from tests.laws import exhaustive
from tests.laws.acts import live
from tests.laws.histories import STEPS, Tally, play, world_of

_SEEDS_AT_ONCE: Final = 4
_SECONDS_BETWEEN_LINES: Final = 5.0
_SEED_BITS: Final = 40


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def report(tally: Tally, seconds: float) -> None:
    """Print the results so far."""
    say(
        f"{seconds:6.0f} s  {tally.num_histories:,} histories  {tally.num_operations:,} operations "
        f"({tally.num_operations / seconds:,.0f} a second)  {tally.num_faults:,} faults  "
        f"{len(tally.violations)} violations"
    )


def simulate(minutes: float, base_seed: int) -> Tally:
    """Play histories from a seed on, on all cores, until time is up or Ctrl-C; those that have begun are finished."""
    tally, start = Tally(), time.monotonic()
    end, next_line = start + 60 * minutes, start + _SECONDS_BETWEEN_LINES
    interrupted = _note_interrupts()
    chunks = (range(at, at + _SEEDS_AT_ONCE) for at in count(base_seed, _SEEDS_AT_ONCE))
    with ProcessPoolExecutor(initializer=_ignore_interrupts) as pool:
        for part in _played(pool, chunks, lambda: time.monotonic() >= end or interrupted.is_set()):
            tally.add(part)
            for violation in part.violations:
                say(str(violation))
            if time.monotonic() >= next_line:
                report(tally, time.monotonic() - start)
                next_line += _SECONDS_BETWEEN_LINES
    report(tally, time.monotonic() - start)
    return tally


def _played(
    pool: Executor, chunks: Iterator[range], is_over: Callable[[], bool]
) -> Iterator[Tally]:
    """Go through the tallies of chunks as they come; when time is over, none is begun, and those begun are finished."""
    running: set[Future[Tally]] = set()
    while True:
        while not is_over() and len(running) < 2 * (os.cpu_count() or 1):
            running.add(pool.submit(play, next(chunks)))
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for one in done:
            yield one.result()


def _note_interrupts() -> Event:
    """Return an event that the first Ctrl-C sets; the second Ctrl-C ends the process as usual."""
    interrupted = Event()

    def note(number: int, frame: FrameType | None) -> None:
        del number, frame
        say("interrupted: the histories that were begun come to their ends")
        interrupted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    return interrupted


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def replay(seed: int) -> int:
    """Play one history in this process; whatever breaks a law comes through with its traceback."""
    world = world_of(seed)
    try:
        live(world, STEPS)
    except BaseException:
        say(
            f"seed {seed} breaks a law in step {world.step}, after {world.num_operations} operations"
        )
        raise
    say(f"seed {seed} breaks no law: {world.num_operations} operations, {dict(world.faults)}")
    return 0


def main() -> int:
    """Simulate, replay one history, or search small worlds exhaustively, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument(
        "--base-seed", type=int, default=secrets.randbits(_SEED_BITS), help="the first seed to play"
    )
    parser.add_argument("--seed", type=int, help="replay this history")
    parser.add_argument("--exhaustive", action="store_true", help="search small worlds instead")
    options = parser.parse_args()
    if options.seed is not None:
        return replay(options.seed)
    if options.exhaustive:
        return exhaustive.search_all(60 * options.minutes, say)
    length = f"{options.minutes:g} minute{'' if options.minutes == 1 else 's'}"
    say(f"base seed {options.base_seed}, {os.cpu_count()} processes, {length}")
    tally = simulate(options.minutes, options.base_seed)
    say("faults: " + ", ".join(f"{number:,} {kind}" for kind, number in tally.faults.most_common()))
    for violation in tally.violations:
        say(str(violation))
    after = options.base_seed + tally.num_histories
    say(f"played all seeds from {options.base_seed} to {after - 1}; go on with FROM={after}")
    return int(bool(tally.violations))


if __name__ == "__main__":
    sys.exit(main())
