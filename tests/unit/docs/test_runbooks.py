"""Laws of runbooks: the commands in them exist, and show what the runbooks say that they show."""

import re
from pathlib import Path
from typing import Final

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvlease.cli.app import app
from kvleased.core.admission.refusals import Reason
from kvleased.probing import PROBES

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
        (
            "KvleaseQuarantineStuck",
            "`death` is `none`: see to it that the process has ended, then `kvlease detach WORKER`",
        ),
        ("KvleaseQuarantineStuck", "`kvlease detach WORKER --force`"),
        ("KvleaseDown", "`kubectl exec POD -c kvleased -- kvleased probe livez`"),
        ("KvleaseNotReady", "`kubectl exec POD -c kvleased -- kvleased probe readyz`"),
        ("KvleaseQuarantineStuck", "the column `death`"),
        ("KvleaseNotReady", "`kvlease drain --undo`"),
        ("KvleaseAccountingMismatch", "`child_pid`"),
        ("KvleasePoolExhausted", 'state="scrubbing"'),
    ],
)
def test_runbook_names_what_helps(runbook: str, said: str) -> None:
    """What shows the reason, or ends the trouble, is written as it is typed or shown."""
    assert said in TEXTS[runbook]


@pytest.mark.parametrize("death_proof", ["pidfd", "none"])
def test_runbook_has_a_way_for_every_worker(death_proof: str) -> None:
    """A stuck worker is ended in a way that depends on its column `death`, and each value is explained."""
    assert f"`death` is `{death_proof}`:" in TEXTS["KvleaseQuarantineStuck"]


@pytest.mark.parametrize("runbook", TEXTS)
def test_no_runbook_asks_a_port_that_is_closed(runbook: str) -> None:
    """No port of a pod is open at its node, so a probe is a command in the pod, or asks on loopback."""
    asked = re.findall(r"curl (?:https?://)?([^:/` ]+)", TEXTS[runbook])

    assert set(asked) <= {"127.0.0.1"}
    probes = re.findall(r"kvleased probe (\w+)", TEXTS[runbook])
    assert set(probes) <= set(PROBES)


def test_every_shortage_is_explained() -> None:
    """Each reason that a refusal for want of room may have is explained in the runbook, which says what to do."""
    meaning, do = TEXTS["KvleasePoolExhausted"].split("## What to do")

    assert [reason.value for reason in Reason if f"`{reason.value}`" not in meaning] == []
    assert [reason.value for reason in Reason if f"`{reason.value}`" not in do] == []
