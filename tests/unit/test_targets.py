"""Laws of the Makefile's targets: none of them overlooks a test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = r"^(?:pytestmark = |.*marks=|@).*\bpytest\.mark\.{}\b"


def test_make_looks_for_processes_where_they_are_started() -> None:
    """Every test that is marked as starting processes lies below a path that `make test` looks in for such."""
    looked_in = _named("PROCESSES")

    marked = _marked("acceptance")

    assert len(marked) > len(looked_in)
    assert [path for path in marked if not _is_below(path, looked_in)] == []


def test_make_looks_for_what_is_thorough_where_it_is() -> None:
    """Every thorough test that starts no process lies below a path that `make test-thorough` looks in for such."""
    # What is tested over a stand-in of a GPU starts processes, and is marked there.
    looked_in = [*_named("HISTORIES"), ROOT / "tests" / "unit", ROOT / "tests" / "gpu"]
    marked = [path for path in _marked("thorough") if path not in _marked("acceptance")]

    assert marked
    assert [path for path in marked if not _is_below(path, looked_in)] == []


def test_make_looks_for_units_wherever_a_test_has_no_mark() -> None:
    """What lies outside of the units and the laws is marked, so that `make test` need not look at it for others."""
    looked_in = [*_named("UNITS"), *_named("PROCESSES"), ROOT / "tests" / "laws"]
    marks = ("acceptance", "cluster", "deploy", "gpu", "vllm")
    marked = {path for mark in marks for path in _marked(mark)}

    tests = [*(ROOT / "tests").rglob("test_*.py")]

    assert len(tests) > len(marked)
    assert [path for path in tests if path not in marked and not _is_below(path, looked_in)] == []


def _named(variable: str) -> list[Path]:
    """Return the paths that a variable of the Makefile names."""
    (line,) = re.findall(rf"^{variable} := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [ROOT / path for path in line.split()]


def _marked(mark: str) -> list[Path]:
    """Return the files that have tests with a mark."""
    pattern = re.compile(MARK.format(mark), re.MULTILINE)
    return [path for path in (ROOT / "tests").rglob("*.py") if pattern.search(path.read_text())]


def _is_below(path: Path, paths: list[Path]) -> bool:
    return any(path.is_relative_to(one) for one in paths)
