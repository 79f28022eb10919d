"""Own the figure of the event loop's lag: how late the control process's ticks are while 2 GiB move beside it.

As `lag.py move ADDRESS` or `lag.py copy DIRECTORY` it moves bytes for each line of input, and as
`lag.py bare` it is a loop with nothing to do.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Final
from unittest import mock

import copies
import cores
import numpy as np
import uvloop
from measure import Figure, paired
from node import TOKENS_PER_BLOCK, Node
from numpy.typing import NDArray
from probe import sitecustomize as probe

from kvlease import Client

CASE: Final = copies.Case(bytes_per_block=64 << 10, num_blocks=4096, integrity="xxh3", note="")
BYTES_MOVED: Final = 2 << 30
MOVES: Final = BYTES_MOVED // CASE.pool_bytes
TURNS_A_ROUND: Final = 5
"""A side's turns in a round; together they have enough ticks that the latest 1 % are several."""
ROUNDS: Final = 9
PERCENT: Final = 99
TIMES_MAX: Final = 1.5
MS_PER_SECOND: Final = 1e3

_Side = tuple["Notes", "subprocess.Popen[bytes]"]
"""A loop's notes, and the process that moves bytes beside it."""


def lag(directory: Path) -> list[Figure]:
    """Measure the control process beside its mover, and a bare loop beside a process that copies in C."""
    with ExitStack() as stack:
        stack.enter_context(cores.awake())
        ours, floor = Notes(directory / "ours"), Notes(directory / "floor")
        with ours.noted():
            node = stack.enter_context(
                Node(directory / "node", "--max-leases", str(CASE.num_blocks))
            )
        node.register(
            "bench",
            bytes_per_token=CASE.bytes_per_block // TOKENS_PER_BLOCK,
            num_blocks=CASE.num_blocks,
            num_slots=CASE.num_slots,
            integrity=CASE.integrity,
        )
        with floor.noted():
            stack.enter_context(_running("bare", ""))
        sides = (
            (ours, stack.enter_context(_running("move", node.local))),
            (floor, stack.enter_context(_running("copy", str(directory)))),
        )
        _round(sides, num_turns=1)  # the first round only warms up
        rounds = [_round(sides, TURNS_A_ROUND) for _ in range(ROUNDS)]
    late = [
        [float(np.percentile(ticks, PERCENT)) for ticks in side]
        for side in zip(*rounds, strict=True)
    ]
    num_ticks = median(len(ticks) for ticks, _ in rounds)
    ratio = paired(*late)
    return [
        Figure(
            name="event loop while 2 GiB move: 99 of 100 ticks are heard late by at most",
            ours=median(late[0]) * MS_PER_SECOND,
            floor=median(late[1]) * MS_PER_SECOND,
            unit="ms",
            ratio=ratio,
            goal=f"≤ {TIMES_MAX:g} x",
            holds=ratio <= TIMES_MAX,
            note=f"floor: a bare loop, nothing else to hear, beside the same copy in C; {num_ticks:.0f} ticks a round",
        )
    ]


def _round(sides: Sequence[_Side], num_turns: int) -> list[NDArray[np.float64]]:
    """Have the sides move in turns; return the seconds by which each side's ticks were late."""
    taken: list[list[NDArray[np.float64]]] = [[] for _ in sides]
    for _ in range(num_turns):
        for (notes, mover), found in zip(sides, taken, strict=True):
            found.append(notes.while_moving(mover))
    return [np.concatenate(found) for found in taken]


class Notes:
    """The ticks that a loop has noted."""

    def __init__(self, path: Path) -> None:
        path.touch()
        os.truncate(path, probe.NOTES_MAX * probe.BYTES_PER_NOTE)
        self._path = path
        self._notes = np.memmap(path, np.float64, "r")

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Have processes that start now note their ticks here."""
        path = os.pathsep.join([str(Path(probe.__file__).parent), os.environ.get("PYTHONPATH", "")])
        with mock.patch.dict(os.environ, {probe.FILE: str(self._path), "PYTHONPATH": path}):
            yield

    def while_moving(self, mover: "subprocess.Popen[bytes]") -> NDArray[np.float64]:
        """Move the bytes once; return the seconds by which ticks were late meanwhile."""
        assert mover.stdin is not None
        assert mover.stdout is not None
        stdin, stdout = mover.stdin, mover.stdout

        def move() -> None:
            stdin.write(b"\n")
            stdin.flush()
            assert stdout.readline(), "the mover has ended"

        taken = self.during(move)
        assert len(taken), "the loop noted nothing"
        return taken

    def during(self, act: Callable[[], object]) -> NDArray[np.float64]:
        """Call `act`; return the seconds by which ticks were late meanwhile."""
        before = self._count
        act()
        return np.array(self._notes[before + 1 : self._count + 1])

    @property
    def _count(self) -> int:
        return int(self._notes[:1].view(np.int64)[0])


@contextmanager
def _running(kind: str, where: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run this file, and wait until it can move."""
    arguments = [sys.executable, __file__, kind, where]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), f"{kind} did not start"
        yield process
    finally:
        process.kill()
        process.communicate()


def _serve(move: Callable[[], object]) -> None:
    """Move once for each line of input."""
    sys.stdout.write("\n")
    sys.stdout.flush()
    for line in sys.stdin:
        move()
        sys.stdout.write(line)
        sys.stdout.flush()


def _move(address: str) -> None:
    with (
        Client(address, deadline_seconds=20, on_doubt="raise") as client,
        client.attach("bench") as worker,
    ):
        copies.scatter(worker, CASE.num_blocks)
        lease = worker.reserve("moved", num_tokens=CASE.num_blocks * TOKENS_PER_BLOCK)

        def move() -> None:
            for _ in range(MOVES // 2):
                lease.evict()
                lease.reload()

        _serve(move)


def _copy(directory: str) -> None:
    copy, _ = copies.compiled(Path(directory))
    with copies.Floor(copy, CASE) as floor:
        floor.begin(np.random.default_rng(2).permutation(CASE.num_blocks).astype(np.int32))

        def move() -> None:
            for _ in range(MOVES // 2):
                floor.evict()
                floor.reload()

        _serve(move)


async def _bare() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "move":
        _move(sys.argv[2])
    elif sys.argv[1] == "copy":
        _copy(sys.argv[2])
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_bare())
