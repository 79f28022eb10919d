"""Own the engine that runs containers: podman with a store and settings of its own, which leave nothing behind."""

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
"""Without systemd, and within the limits of who starts it."""
_WRAPPER: Final = """\
#!/bin/sh
export CONTAINERS_CONF='{folder}/containers.conf'
exec podman --root '{folder}/store' --runroot '{place}/run' --tmpdir '{place}/tmp' --storage-driver {driver} "$@"
"""


class Engine:
    """Podman."""

    def __init__(self, folder: Path) -> None:
        """Note where its store is."""
        self._folder = folder

    @property
    def wrapper(self) -> Path:
        """Podman as a program of its own, for those that call it."""
        return self._folder / "podman"

    @property
    def running_place(self) -> Path:
        """A link to where the engine keeps what ends with it."""
        return self._folder / "running"

    @classmethod
    @contextmanager
    def running(cls, archive: Path) -> Iterator[Self]:
        """Give an engine that has an image; afterwards nothing of it runs or is stored any more."""
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
        """Carry out a command, whatever comes of it."""
        return subprocess.run(
            [self.wrapper, *command],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def inspect(self, container: str) -> dict[str, Any]:
        """Return what the engine knows of a container."""
        (found,) = json.loads(self.do("container", "inspect", container))
        known: dict[str, Any] = found
        return known

    def pid(self, container: str) -> int:
        """Return the first process of a container that runs, by the number that it has outside."""
        state = self.inspect(container)["State"]
        assert state["Running"], f"{container} has ended: {self.logs(container)}"
        return int(state["Pid"])

    def logs(self, container: str) -> str:
        """Return all that a container has written."""
        done = self.try_to("logs", container)
        return done.stdout + done.stderr

    def until(self, container: str, look: Callable[[], T | None]) -> T:
        """Look until there is something to see, for as long as a container may take."""
        end = time.monotonic() + SECONDS_MAX
        while (found := look()) is None:
            assert time.monotonic() < end, f"it does not come: {self.logs(container)}"
            time.sleep(_POLL_SECONDS)
        return found

    def remove_all(self) -> None:
        """Remove pods, containers, volumes and images, those of a run that was broken off among them."""
        if not self.wrapper.exists():
            return
        for kind in ("pod", "container"):
            self.try_to(kind, "rm", "--force", "--all", "--time", "0")
        shutil.rmtree(self.running_place.resolve(), ignore_errors=True)
        shutil.rmtree(self._folder)


def status_of(pid: int) -> dict[str, str]:
    """Return what the kernel says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def namespace_of(pid: int, kind: str) -> str:
    """Return which namespace of a kind a process is in."""
    return str(Path(f"/proc/{pid}/ns/{kind}").readlink())


def child_of(pid: int, role: str) -> int | None:
    """Return the child of a container's first process that has a role, by the number that it has outside."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            if role.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return child
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None
