"""Own a server's process: how it is started, stopped, continued and killed."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_SECONDS_MAX = 60


class ServerProcess:
    """One process that is started anew as often as a test wants."""

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = {**os.environ, **environment}
        self.folder = folder

    def start(self, is_ready: Callable[[], bool]) -> None:
        """Start it and wait until it is ready."""
        log = (self.folder / "log").open("a")
        with log:
            self.process = subprocess.Popen(
                self._command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + _SECONDS_MAX
        while not is_ready():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.01)

    def stop(self) -> None:
        """Have it do nothing any more, with its connections as they are."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """Have it do what it was stopped in."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as if its machine had lost power."""
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    """Return a port of the loopback interface that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Tell whether somebody listens on a port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
