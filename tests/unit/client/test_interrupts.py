"""Laws of ^C while a command is still being imported: it ends at once, and says nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvlease._interrupts import ended_at_once

_RUN = "import signal; signal.signal(signal.SIGINT, {handler}); from {module} import main; main()"


@pytest.mark.parametrize(
    ("module", "imported"), [("kvlease.cli", "typer"), ("kvleased.__main__", "argparse")]
)
def test_interrupt_during_imports_ends_the_command_without_a_word(
    module: str, imported: str, tmp_path: Path
) -> None:
    """The process dies of the signal, as shells expect, and standard error has no traceback."""
    slow = "import time; print('importing', flush=True); time.sleep(60)"
    (tmp_path / f"{imported}.py").write_text(slow, encoding="utf-8")
    command = _RUN.format(handler="signal.default_int_handler", module=module)
    with subprocess.Popen(
        [sys.executable, "-c", command],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)

    assert process.returncode == -signal.SIGINT
    assert said == ""


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_handler_is_the_same_afterwards(handler: object) -> None:
    """What happens at ^C once the command runs is its own business, and an ignored one stays ignored all the time."""
    before = signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]  # both are handlers
    try:
        with ended_at_once():
            meanwhile = signal.getsignal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)

    assert (meanwhile is signal.SIG_IGN) == (handler is signal.SIG_IGN)
    assert (meanwhile is signal.SIG_DFL) == (handler is signal.default_int_handler)
