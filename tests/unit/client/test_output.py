"""Laws of output that cannot be written: a program ends with one line and a status, and never looks successful."""

import errno
import io
import subprocess
import sys
from pathlib import Path

import pytest

from kvlease._output import written_or_refused

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "tests" / "fixtures" / "configs" / "llama3-8b.json"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("kvlease --version", id="a line"),
        pytest.param("kvlease --help", id="help"),
        pytest.param(f"kvlease plan --model {MODEL} --device-memory 8GiB", id="tables"),
        pytest.param(f"kvlease plan --model {MODEL} --device-memory 8GiB --json", id="json"),
        pytest.param("kvleased --version", id="a line of the daemon's"),
        pytest.param("kvleased --help", id="usage of the daemon"),
        pytest.param("kvleased serve --help", id="help of the daemon"),
    ],
)
def test_full_device_is_told_in_one_line(command: str) -> None:
    """Standard error has one sentence and no traceback, and scripts see the failure by the status."""
    program, *arguments = command.split()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [Path(sys.executable).with_name(program), *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )

    assert done.returncode == 1
    assert done.stderr == f"{program}: cannot write its output: No space left on device\n"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(errno.ENOSPC, "No space left on device", "trace.jsonl"), id="file"),
        pytest.param(ConnectionResetError(errno.ECONNRESET, "reset"), id="connection"),
    ],
)
def test_other_errors_are_not_taken_for_those_of_output(error: OSError) -> None:
    """A failure of a file or a connection is not reported as a failure of the output."""
    with pytest.raises(OSError, match=str(error.strerror)), written_or_refused("kvlease"):
        raise error


@pytest.mark.parametrize("program", ["kvlease", "kvleased"])
def test_character_that_the_encoding_lacks_is_escaped(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal that knows only ASCII, a tenant's name or a table's line is escaped, and no traceback is shown."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with written_or_refused(program):
        sys.stdout.write("ch\u00e4t \u2500\n")

    assert written.getvalue() == b"ch\\xe4t \\u2500\n"
