"""Laws of the page about planning: it says what the planner does."""

import re
import subprocess
import sys
from pathlib import Path

from kvlease.spec import KINDS
from kvleased.planning.advice.settings import SETTINGS

_DOCS = Path(__file__).parents[3] / "docs"
_PAGE = (_DOCS / "planning.md").read_text()


def test_region_is_drawn_from_a_plan() -> None:
    """docs/region.svg shows what the planner plans, and the page shows docs/region.svg."""
    done = subprocess.run([sys.executable, str(_DOCS / "draw_region.py"), "--check"], check=False)

    assert done.returncode == 0, "run python docs/draw_region.py"
    assert "(region.svg)" in _PAGE


def test_every_kind_of_layer_is_described() -> None:
    """The table of kinds has exactly the kinds of layers that the code has."""
    described = re.findall(r"^\| `(\w+)` \|", _PAGE, flags=re.MULTILINE)

    assert sorted(described) == sorted(KINDS)


def test_every_setting_of_what_ifs_is_listed() -> None:
    """Every setting that a what-if can change is listed by its name."""
    assert [name for name in SETTINGS if f"`{name}`" not in _PAGE] == []
