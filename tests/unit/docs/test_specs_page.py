"""Laws of the page about specs: it says what the code takes, and the code takes its examples."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvlease.cli.plan.inputs import read_source
from kvlease.plan import PlanInputs
from kvleased.planning import plan

_DOCS = Path(__file__).parents[3] / "docs"
_EXAMPLES = re.findall(
    r"^```json\n(.*?)^```", (_DOCS / "specs.md").read_text(), re.DOTALL | re.MULTILINE
)


def test_tables_are_written_from_the_code() -> None:
    """The page's fields, types, defaults, ranges and values are those of the code."""
    done = subprocess.run([sys.executable, str(_DOCS / "write_specs.py"), "--check"], check=False)

    assert done.returncode == 0, "run python docs/write_specs.py"


@pytest.mark.parametrize("example", _EXAMPLES)
def test_examples_can_be_planned(tmp_path: Path, example: str) -> None:
    """`kvlease plan --specs` plans every file that the page shows."""
    path = tmp_path / "specs.json"
    path.write_text(example)

    layers = read_source("", str(path)).layers

    assert plan(PlanInputs(layers=layers, tokens_per_block=16, device_bytes=2**34)).num_blocks


def test_planning_page_links_here() -> None:
    """A reader of the page about plans finds the page about specs."""
    assert "(specs.md)" in (_DOCS / "planning.md").read_text()
