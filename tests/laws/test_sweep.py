"""Whichever call fails or kills a disk mover, everything acknowledged is there, and no served byte is wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.laws.sweep import sweep
from tests.laws.sweep_bugs import BUGS
from tests.laws.sweep_server import why_not

pytestmark = [pytest.mark.acceptance, pytest.mark.thorough]

_POINTS = 2_000
_SYMPTOMS = {
    "old_label_stays": "torn",
    "acknowledged_before_written": "lost",
    "short_write_is_done": "lost",
    "failed_write_is_done": "lost",
    "bytes_are_not_checked": "wrong",
    "left_over_is_not_known": "leaked",
}
_EMPTY_WORLD, _WORLD = 0, 1


@pytest.fixture(autouse=True)
def _traceable(tmp_path: Path) -> None:
    if reason := why_not(tmp_path):
        pytest.skip(reason)


def test_no_fault_loses_leaks_or_corrupts() -> None:
    """Two thousand faults, one at a time, in every call of small worlds: lost 0, leaked 0, wrong 0."""
    tally = sweep(_POINTS)

    assert not tally.broken
    assert tally.points >= _POINTS


@pytest.mark.parametrize("bug", BUGS)
def test_sweep_finds_seeded_bug(bug: str) -> None:
    """The sweep detects a store that does one thing wrong."""
    world = _EMPTY_WORLD if bug == "left_over_is_not_known" else _WORLD
    words = [sys.executable, "-m", "tests.laws.sweep", "--bug", bug]
    words += ["--seed", str(world), "--syscalls", "pwritev2,fallocate"]

    run = subprocess.run(words, capture_output=True, text=True, check=False)

    assert (run.returncode, run.stderr) == (1, "")
    assert re.search(rf"{_SYMPTOMS[bug]} [1-9]", run.stdout)
