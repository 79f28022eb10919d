"""Laws of the Makefile's targets: none of them overlooks a test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"^(?:pytestmark = |.*marks=).*\bpytest\.mark\.acceptance\b", re.MULTILINE)


def test_make_looks_for_processes_where_they_are_started() -> None:
    """Every test that is marked as starting processes lies below a path that `make test` looks in for such."""
    (line,) = re.findall(r"^PROCESSES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    looked_in = [ROOT / path for path in line.split()]

    marked = [path for path in (ROOT / "tests").rglob("*.py") if MARK.search(path.read_text())]

    assert len(marked) > len(looked_in)
    assert [path for path in marked if not any(path.is_relative_to(one) for one in looked_in)] == []
