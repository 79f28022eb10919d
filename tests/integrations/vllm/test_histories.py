"""Prove that no step of vLLM's own scheduler reads what was not written for its request, in histories of many seeds.

Daemon and ranks are played; schedulers and connectors are the real ones. `played/history.py` plays other seeds by hand.
"""

import subprocess
from pathlib import Path

import pytest

from tests.integrations.vllm.births import ran
from tests.integrations.vllm.jobs import Job

pytestmark = pytest.mark.vllm

MODES = ["shared", "owned", "offload", "shared+offload", "owned+offload"]
SEEDS = "0-19"


def played(mode: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Play histories of a mode."""
    script = Path(__file__).with_name("played") / "history.py"
    return ran(script, mode, *words, environment=Job().environ())


@pytest.mark.parametrize("mode", MODES)
def test_no_step_reads_what_others_wrote(mode: str) -> None:
    """Whatever happens, every read finds what was written for its request, every request ends, and no block is lost."""
    told = played(mode, SEEDS)

    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("mode", ["shared", "owned", "offload"])
def test_blocks_of_a_request_that_is_taken_out_of_its_step_are_not_published(mode: str) -> None:
    """With scheduling by priority, a request can lose its place in a step in which it was to fill a block."""
    script = Path(__file__).with_name("played") / "taking_out.py"
    told = ran(script, mode, environment=Job().environ())

    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("mode", ["shared", "owned", "offload"])
def test_blocks_of_a_request_that_ends_by_an_error_are_full(mode: str) -> None:
    """If a request is ended by an error amid its prompt, a block that it has filled in part is not to be found."""
    script = Path(__file__).with_name("played") / "breaking_off.py"
    told = ran(script, mode, environment=Job().environ())

    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize(
    ("mistake", "mode", "seeds"),
    [
        pytest.param("publishing-early", "shared", ["8", "12", "62", "74"], id="no fence, shared"),
        pytest.param("publishing-early", "owned", ["9", "32"], id="no fence, owned"),
        pytest.param("resending-after-reset", "shared", ["48", "159"], id="old keys after a reset"),
    ],
)
def test_mistakes_show_as_wrong_tokens(mistake: str, mode: str, seeds: list[str]) -> None:
    """Histories that go well show a wrong token if the mistake is made; more seeds than one, as others may come to."""
    told = played(mode, *seeds, "--mistake", mistake)

    assert played(mode, *seeds).returncode == 0
    assert told.returncode != 0
    assert "WrongTokenError" in told.stderr
