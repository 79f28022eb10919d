"""Law of docs/states.md: what it says is what the code does."""

import subprocess
import sys
from pathlib import Path

_DRAW = Path(__file__).parents[3] / "docs" / "draw_states.py"


def test_states_page_is_drawn_from_the_tables() -> None:
    """docs/states.md is what the core's tables draw."""
    done = subprocess.run([sys.executable, str(_DRAW), "--check"], check=False)

    assert done.returncode == 0, "run python docs/draw_states.py"
