"""Own the look at the GPU before the daemon starts, in a process of its own, so that no other loads a driver."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from kvlease.errors import InvalidError
from kvleased.system.directories import UnusableError

LOOK_SECONDS_MAX: Final = 60.0
"""Seconds that a driver may take to wake a GPU; a driver that hangs would take for ever."""
_ADVICE: Final = "; or leave out --device, for pools in CPU memory"


def look_at(device: str, seconds_max: float = LOOK_SECONDS_MAX) -> dict[str, Any]:
    """Return the facts about the GPU that the setting `device` names.

    Raises:
        UnusableError: the GPU cannot be used; the message says what to do.
    """
    command = [sys.executable, "-P", "-m", "kvleased", "look", device]
    try:
        looked = subprocess.run(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds_max,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"--device {device}: the driver has not answered for {seconds_max:.0f} s; check nvidia-smi{_ADVICE}"
        raise UnusableError(message) from None
    if looked.returncode:
        reason = (
            looked.stderr.strip() or f"its driver ended the process ({looked.returncode})"
        ).splitlines()[-1]
        raise UnusableError(f"--device {device}: {reason}{_ADVICE}")
    facts: dict[str, Any] = json.loads(looked.stdout)
    return facts


def run(argv: Sequence[str]) -> int:
    """Print the facts about a GPU as JSON, or why it cannot be used; return the exit status."""
    from kvleased.memory.cuda import Gpu  # noqa: PLC0415 - not in the process that looks

    try:
        facts = Gpu.opened(argv[0]).facts()
    except InvalidError as error:
        sys.stderr.write(f"{error}\n")
        return os.EX_CONFIG
    sys.stdout.write(f"{json.dumps(asdict(facts))}\n")
    return 0
