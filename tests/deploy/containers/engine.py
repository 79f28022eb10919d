"""Own the container engine: podman with a store and settings of its own, which leaves nothing behind."""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from tests.deploy.containers.images import PLACE, driver

T = TypeVar("T")

SECONDS_MAX: Final = 90.0
_POLL_SECONDS: Final = 0.02
_STORE: Final = PLACE / "pods"
_SETTINGS: Final = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "file"
"""
"""Settings for a machine without systemd, within the limits of the user who starts it."""
_WRAPPER: Final = """\
#!/bin/sh
export CONTAINERS_CONF='{folder}/containers.conf'
exec podman --root '{folder}/store' --runroot '{place}/run' --tmpdir '{place}/tmp' --storage-driver {driver} "$@"
"""


class Engine:
    """Podman."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder of its store."""
        self._folder = folder

    @property
    def wrapper(self) -> Path:
        """Return the path of a script that runs podman with these settings."""
        return self._folder / "podman"

    @property
    def running_place(self) -> Path:
        """Return the link to the folder of files that end with the engine."""
        return self._folder / "running"

    @classmethod
    @contextmanager
    def running(cls, archive: Path) -> Iterator[Self]:
        """Give an engine with an image; afterwards nothing of it runs or is stored."""
        engine = cls(_STORE)
        engine.remove_all()
        _STORE.mkdir(parents=True)
        # The engine refuses to run below a path of more than 50 characters.
        engine.running_place.symlink_to(tempfile.mkdtemp(prefix="kvlease-", dir="/tmp"))
        (_STORE / "containers.conf").write_text(_SETTINGS)
        place = engine.running_place.resolve()
        engine.wrapper.write_text(_WRAPPER.format(folder=_STORE, place=place, driver=driver()))
        engine.wrapper.chmod(0o700)
        try:
            engine.do("load", "--quiet", "--input", str(archive))
            yield engine
        finally:
            engine.remove_all()

    def do(self, *command: str) -> str:
        """Carry out a command, which must succeed, and return what it prints."""
        done = self.try_to(*command)
        assert done.returncode == 0, f"podman {' '.join(command)}: {done.stderr}"
        return done.stdout

    def try_to(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Carry out a command, which may fail."""
        return subprocess.run(
            [self.wrapper, *command],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def inspect(self, container: str) -> dict[str, Any]:
        """Return the engine's description of a container."""
        (found,) = json.loads(self.do("container", "inspect", container))
        known: dict[str, Any] = found
        return known

    def pid(self, container: str) -> int:
        """Return the process id, as seen outside, of a running container's first process."""
        state = self.inspect(container)["State"]
        assert state["Running"], f"{container} has ended: {self.logs(container)}"
        return int(state["Pid"])

    def logs(self, container: str) -> str:
        """Return all output of a container."""
        done = self.try_to("logs", container)
        return done.stdout + done.stderr

    def until(self, container: str, look: Callable[[], T | None]) -> T:
        """Repeat `look` until it returns something, within the time that a container may take."""
        end = time.monotonic() + SECONDS_MAX
        while (found := look()) is None:
            assert time.monotonic() < end, f"it does not come: {self.logs(container)}"
            time.sleep(_POLL_SECONDS)
        return found

    def remove_all(self) -> None:
        """Remove all pods, containers, volumes and images, also those of an interrupted run."""
        if not self.wrapper.exists():
            return
        for kind in ("pod", "container"):
            self.try_to(kind, "rm", "--force", "--all", "--time", "0")
        shutil.rmtree(self.running_place.resolve(), ignore_errors=True)
        shutil.rmtree(self._folder)


def status_of(pid: int) -> dict[str, str]:
    """Return the kernel's status of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def namespace_of(pid: int, kind: str) -> str:
    """Return the process's namespace of this kind."""
    return str(Path(f"/proc/{pid}/ns/{kind}").readlink())


def child_of(pid: int, role: str) -> int | None:
    """Return the process id, as seen outside, of the first process's child with this role."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            if role.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return child
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None
