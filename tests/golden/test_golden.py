"""Laws of golden vectors: each is answered as the reference answers it, or better with a recorded reason."""

import json
from pathlib import Path

import pytest

from tests.golden.differences import DIFFERENCES
from tests.golden.run import SUITES, verdicts

_VECTORS = Path(__file__).parent / "vectors"
_DOCUMENT = Path(__file__).parents[2] / "docs" / "differences.md"


@pytest.mark.parametrize("path", sorted(_VECTORS.glob("*.json")), ids=lambda path: path.stem)
def test_answers_are_those_of_the_reference(path: Path) -> None:
    """No answer to a suite's vectors differs without a reason that holds."""
    differing = {verdict["id"]: verdict["why"] for verdict in verdicts(path) if not verdict["ok"]}

    assert not differing, json.dumps(differing, indent=1)[:4000]


def test_differences_page_says_what_the_table_does() -> None:
    """The page has one row for each difference in the table, by its name, and no others."""
    rows = [
        line.split("|")[1].strip()
        for line in _DOCUMENT.read_text().splitlines()
        if line.startswith("|") and not line.startswith(("| difference |", "|---"))
    ]

    assert rows == [difference.name for difference in DIFFERENCES]


def test_every_operation_of_the_vectors_is_known() -> None:
    """Each operation in the files is answered by a function."""
    operations = {
        vector["op"]
        for path in _VECTORS.glob("*.json")
        for vector in json.loads(path.read_text())["vectors"]
    }

    assert operations <= SUITES.keys()
