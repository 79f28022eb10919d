"""Laws of the pages for operators: they say what the code says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlease.cli.app import app

_DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("script", ["write_limits.py", "write_sizing.py"])
def test_page_is_written_from_the_code(script: str) -> None:
    """The page's numbers and outputs are those of the code."""
    done = subprocess.run([sys.executable, str(_DOCS / script), "--check"], check=False)

    assert done.returncode == 0, f"run python docs/{script}"


def test_every_limit_says_what_it_bounds() -> None:
    """No row of the page has only a number."""
    rows = re.findall(r"^\| `.*\|$", (_DOCS / "limits.md").read_text(), re.MULTILINE)

    assert len(rows) > 100
    assert [row for row in rows if not row.rstrip("| ").strip() or row.endswith("|  |")] == []


@pytest.mark.parametrize("page", ["quickstart.md", "install.md"])
def test_plans_of_the_first_pages_can_be_made(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `kvlease plan` on the first pages works in a clone, without a network or a model."""
    told = re.findall(
        r"^(?:\.venv/bin/)?kvlease (plan .*)$", (_DOCS / page).read_text(), re.MULTILINE
    )
    monkeypatch.chdir(_DOCS.parent)
    monkeypatch.setenv("HF_HOME", "/nonexistent")

    results = [CliRunner().invoke(app, shlex.split(one)) for one in told]

    assert results
    assert [one.stderr for one in results if one.exit_code] == []


def test_numbers_in_the_prose_about_sizes_are_those_of_the_plan() -> None:
    """What the text says of shares is true of the plan above it."""
    page = (_DOCS / "sizing.md").read_text()
    found = re.search(r"([\d,]+) blocks of 2.00 MiB", page)
    assert found is not None
    blocks = int(found[1].replace(",", ""))

    assert f"the first plan's {blocks:,} blocks" in page
    assert f"a minimum of 40 % is {-(-blocks * 40 // 100):,} blocks" in page
    assert f"a maximum of 50 % is {blocks // 2:,}" in page
