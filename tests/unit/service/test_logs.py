"""Logs are JSON, one event a line, and carry no values of failed calls."""

import json
import subprocess
import sys

SCRIPT = """
import logging
from kvleased import logs
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
    assert "it failed" in json.dumps(records[2])
    assert "it failed" in json.dumps(records[3])
    assert "CANARY" not in result.stderr
