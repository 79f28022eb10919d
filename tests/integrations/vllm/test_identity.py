"""An identity tells every setting of vLLM that changes a byte, and no other; a new one fails until it is decided on."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.integrations.vllm import identities
from tests.integrations.vllm.births import ran
from tests.integrations.vllm.decisions import DECISIONS
from tests.integrations.vllm.jobs import Job

pytestmark = pytest.mark.vllm

Changes = dict[str, dict[str, list[str]]]


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> Changes:
    """Return what a change of each setting alone changes in the identity, by class and name."""
    places = {name: decided.path for name, decided in DECISIONS.items()}
    environment = Job().environ()
    environment.pop("PYTHONHASHSEED", None)
    folder = tmp_path_factory.mktemp("identities")
    run = ran(Path(identities.__file__), str(folder), json.dumps(places), environment=environment)
    assert run.returncode == 0, run.stderr[-4_000:]
    found: Changes = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", DECISIONS)
def test_every_setting_is_decided_on(changes: Changes, name: str) -> None:
    """A setting of a new vLLM is in no table, and one that has gone is still in one."""
    counts = Counter(DECISIONS[name].names())

    new = [one for one in changes[name] if one not in counts]
    gone = [one for one in counts if one not in changes[name]]

    assert not new, (
        f"{name} has settings on which nobody has decided: {', '.join(new)}. Decide whether each changes a byte of K "
        "or V: if it may, let fields.py tell it; either way, say so in decisions.py"
    )
    assert not gone, f"{name} has no settings {', '.join(gone)}; remove them from decisions.py"
    assert [one for one, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("name", DECISIONS)
def test_setting_that_is_told_changes_the_identity(changes: Changes, name: str) -> None:
    """Two engines that differ in such a setting alone have two identities, and a refusal names the field."""
    told = DECISIONS[name].told_names()

    silent = {one: field for one, field in told.items() if field not in changes[name][one]}
    assert silent == {}


@pytest.mark.parametrize("name", DECISIONS)
def test_setting_that_moves_nothing_does_not_change_the_identity(
    changes: Changes, name: str
) -> None:
    """Engines that differ in such settings share their blocks."""
    idle = DECISIONS[name].idle_names()

    assert {one: changes[name][one] for one in idle} == {one: [] for one in idle}
