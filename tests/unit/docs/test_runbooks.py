"""Whoever follows a runbook types commands that there are, and finds what it says that they show."""

import re
from pathlib import Path
from typing import Final

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvlease.cli.app import app
from kvleased.core.refusals import Reason

RUNBOOKS: Final = sorted((Path(__file__).parents[3] / "docs" / "runbooks").glob("*.md"))
TEXTS: Final = {path.stem: path.read_text() for path in RUNBOOKS}


@pytest.mark.parametrize("runbook", TEXTS)
def test_commands_of_a_runbook_are_there(runbook: str) -> None:
    """Each command has the name and the options that the runbook gives it."""
    commands = get_command(app).commands  # type: ignore[attr-defined]  # a group has

    for line in re.findall(r"`kvlease ([^`]+)`", TEXTS[runbook]):
        name, *rest = line.split()
        assert name in commands, line
        help_text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        for option in rest:
            assert not option.startswith("--") or option in help_text, line


@pytest.mark.parametrize(
    ("runbook", "said"),
    [
        ("KvleaseTierDown", "`kvlease caches` says why"),
        ("KvleaseQuarantineStuck", "`kvlease detach WORKER`"),
        ("KvleaseQuarantineStuck", "the column `death`"),
        ("KvleaseNotReady", "`kvlease drain --undo`"),
        ("KvleaseAccountingMismatch", "`child_pid`"),
        ("KvleasePoolExhausted", 'state="scrubbing"'),
    ],
)
def test_runbook_names_what_helps(runbook: str, said: str) -> None:
    """What shows the reason, or ends the trouble, is named as it is typed or shown."""
    assert said in TEXTS[runbook]


def test_every_shortage_is_explained() -> None:
    """Whatever a refusal for want of room gives as its reason, the runbook says what that is."""
    assert all(f"`{reason.value}`" in TEXTS["KvleasePoolExhausted"] for reason in Reason)
