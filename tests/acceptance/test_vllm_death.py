"""An engine with owned memory overwrites what is cached only if nobody can ever find it again."""

import errno
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from kvlease.integrations.vllm.owned.death import is_dead
from tests.acceptance.serving import Serving, served
from tests.acceptance.tiering import child, kill_all

pytestmark = pytest.mark.acceptance

SECONDS_TO_END = 10.0
"""Seconds that the processes of a killed daemon take at most to end."""


def is_refused(serving: Serving) -> bool:
    """Tell whether nobody listens at the daemon's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        found = asking.connect_ex(str(serving.runtime_dir / "kvlease.sock"))
    return found in {errno.ECONNREFUSED, errno.ENOENT}


def test_daemon_whose_control_process_is_replaced_is_not_dead(tmp_path: Path) -> None:
    """The next control process finds all blocks again; only without their supervisor nobody ever does."""
    with served(tmp_path / "run") as serving:
        address = serving.address("unix")
        control = child(serving, "control")
        os.kill(control, signal.SIGSTOP)
        assert not is_dead(address)

        os.kill(control, signal.SIGKILL)
        serving.until(lambda: is_refused(serving))
        assert not is_dead(address)
        serving.wait_until_ready()
        assert not is_dead(address)

        kill_all(serving)
        end = time.monotonic() + SECONDS_TO_END
        while not is_dead(address):
            assert time.monotonic() < end, "a daemon that was killed counts as living"
            time.sleep(0.02)
