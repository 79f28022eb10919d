"""Logs are JSON, one event a line, and carry no values of failed calls."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging
from kvleased.telemetry import logs
logs.import_structlog()
import structlog, sys
logs.configure("info")
log = structlog.get_logger()

def fail(token):
    keys = token * 2
    raise RuntimeError("it failed")

logs.line("info", "plain", number=1)
logs.line("debug", "hidden")
log.info("structured", number=2)
for write in (log.exception, logging.getLogger("library").exception):
    try:
        fail("CANARY")
    except RuntimeError:
        write("broken")
assert "rich" not in sys.modules
"""


def test_logs_are_lines_of_json_without_values() -> None:
    """Every line is one JSON object with the same fields; a traceback shows no local value."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )

    records = [json.loads(line) for line in result.stderr.splitlines()]

    assert [record["event"] for record in records] == ["plain", "structured", "broken", "broken"]
    assert all({"timestamp", "level", "event"} <= record.keys() for record in records)
    assert len({record["pid"] for record in records}) == 1
    assert not any("process" in record for record in records)
    assert {tuple(record)[:4] for record in records} == {("timestamp", "level", "event", "pid")}
    stamp = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
    assert all(stamp.fullmatch(record["timestamp"]) for record in records)
    assert "it failed" in json.dumps(records[2])
    assert "it failed" in json.dumps(records[3])
    assert "CANARY" not in result.stderr


def test_log_that_takes_nothing_ends_nobody() -> None:
    """If the disk below the log is full, lines are lost; whoever writes them goes on."""
    script = f"from kvleased.telemetry import logs; logs.hold_up_nobody(){SCRIPT}sys.stdout.write('went on')"
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=True,
            timeout=60,
        )

    assert result.stdout == "went on"


@pytest.mark.parametrize(
    "fail",
    [
        pytest.param("raise RuntimeError('it failed')", id="the process"),
        pytest.param("Thread(target=int, args=('it failed',)).start()", id="a thread"),
        pytest.param("logging.getLogger('asyncio').error('it failed')", id="a library"),
    ],
)
def test_unexpected_exception_is_one_event(fail: str) -> None:
    """An uncaught exception is one line of JSON, so that no reader of logs meets half a traceback."""
    script = "import logging\nfrom threading import Thread\nfrom kvleased.telemetry import logs\n"
    script += f"logs.catch_all('mover')\nlogging.basicConfig(handlers=[logs._Lines()])\n{fail}"

    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )

    (line,) = result.stderr.splitlines()
    assert "it failed" in line
    assert json.loads(line)["level"] == "error"
