"""Own the quick start of a life's process: a fork of the nursery, which has already imported the engine."""

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.integrations.vllm.models import REFERENCE, ROOT

SECONDS_MAX: Final = 600.0
"""Seconds within which a life must answer; an engine that takes longer hangs."""
BUILD: Final = ROOT / "build" / "vllm"


class Born:
    """A life that the nursery forked."""

    def __init__(self, path: Path, words: Mapping[str, object], descriptors: Sequence[int]) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(str(path))
        told = json.dumps(words).encode()
        socket.send_fds(self._connection, [told], list(descriptors))
        self._connection.settimeout(SECONDS_MAX)
        self.pid = int(self._connection.recv(64))

    def wait(self, seconds_max: float) -> int:
        """Wait until the life has ended, and return its status."""
        self._connection.settimeout(seconds_max)
        status = int(self._connection.recv(64))
        self._connection.close()
        return status


class Nursery:
    """The process from which lives are forked; it ends with the tests."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvlease-nursery-")
        self._path = Path(self._folder.name, "socket")
        logs = BUILD / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "nursery.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(REFERENCE), str(Path(__file__).with_name("nursery.py")), str(self._path)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self._path.exists, "the nursery does not open")

    def bear(
        self,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        script: str = "",
        arguments: Sequence[str] = (),
    ) -> Born:
        """Begin a life, or run a script."""
        words = {
            "environment": dict(environment),
            "script": script,
            "arguments": list(arguments),
        }
        return Born(self._path, words, descriptors)

    def close(self) -> None:
        """End the nursery and all living lives."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS_MAX)
        self._folder.cleanup()


_nursery: Nursery | None = None


def nursery(environment: Mapping[str, str]) -> Nursery:
    """Return the nursery of this process; the first call opens it."""
    global _nursery  # noqa: PLW0603  # opening one takes longer than most tests
    if _nursery is None:
        _nursery = Nursery(environment)
    return _nursery


def ran(
    script: Path, *arguments: str, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a script where the engine is already imported; return its status and output."""
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
        with Path(os.devnull).open("rb") as nothing:
            descriptors = [one.fileno() for one in (nothing, told, errors)]
            birth = nursery(environment).bear(environment, descriptors, str(script), arguments)
        status = birth.wait(SECONDS_MAX)
        for one in (told, errors):
            one.seek(0)
        return subprocess.CompletedProcess(
            [str(script), *arguments], status, told.read().decode(), errors.read().decode()
        )


def close_nursery() -> None:
    """End the nursery, if there is one."""
    global _nursery  # noqa: PLW0603
    if _nursery is not None:
        _nursery.close()
    _nursery = None


def until(is_so: Callable[[], bool], otherwise: str, seconds_max: float = SECONDS_MAX) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds_max
    while not is_so():
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)
