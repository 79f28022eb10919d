"""Laws of process metrics: which processes there are, what they use, and how late the loop hears a clock."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvleased.metrics import process
from kvleased.metrics.catalogue import BY_NAME
from kvleased.metrics.parts import Part
from kvleased.metrics.process import Pulse, processes

CHILD = "import sys; print(flush=True); sys.stdin.read()"


def told(pulse: Pulse) -> dict[tuple[str, str], float]:
    """Return the reported values, by metric and role."""
    part = Part()
    processes(part, pulse)
    return {
        (sample.name, sample.labels.get("role", "")): sample.value
        for family in part
        for sample in family.samples
    }


def test_process_without_a_supervisor_is_alone() -> None:
    """Without a supervisor the process reports itself alone, as the one that serves."""
    found = told(Pulse())

    assert found["kvlease_process_private_bytes", "control"] > 0
    assert found["kvlease_process_open_fds", "control"] >= 3
    assert {role for _, role in found} == {"", "control"}
    assert 0 < found["kvlease_memory_used_bytes", ""] < found["kvlease_memory_limit_bytes", ""]


@pytest.fixture
def child() -> Iterator[int]:
    """A child of this process, with the command line of a mover."""
    arguments = [sys.executable, "-c", CHILD, "kvleased", "mover"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdin is not None
        started.stdout.readline()
        yield started.pid
        started.stdin.close()


def test_children_of_the_supervisor_are_told_by_role(
    child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each child of the supervisor that has a role is reported; one that has just ended is left out."""
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setattr(process, "_arguments", pretending(child))

    roles = {role for _, role in told(Pulse())}

    assert roles == {"", process.SUPERVISOR, "mover"}


def pretending(child: int) -> Callable[[Path], list[str]]:
    """Return a reader of command lines that makes this process look like a child of a supervisor."""

    def arguments(where: Path) -> list[str]:
        if where.name == "self":
            return ["python", "-P", "-m", "kvleased", "control"]
        return ["python", "-P", "-m", "kvleased", "mover"] if where.name == str(child) else []

    return arguments


def test_command_line_of_nobody_is_empty() -> None:
    """A process that has ended between two looks has an empty command line."""
    assert process._arguments(Path("/proc/0")) == []


async def test_pulse_notes_how_late_it_is_heard() -> None:
    """If the loop is stopped for a while, it hears its clock that much later."""
    pulse = Pulse()
    pulse.start()
    time.sleep(3 * process.BEAT_SECONDS)  # noqa: ASYNC251 - that is the point
    async with asyncio.timeout(10):
        while not sum(pulse.lag.counts):  # noqa: ASYNC110 - nobody would set an event
            await asyncio.sleep(0)
    pulse.stop()

    assert pulse.lag.seconds >= process.BEAT_SECONDS
    Pulse().stop()


def test_parts_know_the_catalogue() -> None:
    """A metric that the catalogue lacks, or lists as another kind, cannot be reported."""
    part = Part()
    with pytest.raises(KeyError):
        part.add("no_such_metric", 1)
    with pytest.raises(AssertionError):
        part.add("wait_seconds", 1, "cache", "verb")
    with pytest.raises(AssertionError):
        part.add_histogram("ready", (1.0,), (1, 2), 3.0)
    assert "ready" in BY_NAME
