"""Own a cluster of one node: Kubernetes' programs in namespaces and a directory of their own, which leave nothing."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from tests.deploy.tools import ROOT, Document

T = TypeVar("T")

PLACE: Final = ROOT / "build" / "cluster"
SECONDS_MAX: Final = 180.0
_POLL_SECONDS: Final = 0.2
_HERE: Final = Path(__file__).parent
_PARENT: Final = Path("/tmp")
_PREFIX: Final = "kvlease-cluster-"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_ADDRESS: Final = "10.244.0.1"
_KUBECONFIG: Final = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [
        {
            "name": "node",
            "cluster": {"server": "https://127.0.0.1:6443", "insecure-skip-tls-verify": True},
        }
    ],
    "users": [{"name": "admin", "user": {"token": "of-the-tests"}}],
    "contexts": [{"name": "node", "context": {"cluster": "node", "user": "admin"}}],
    "current-context": "node",
}
_NETWORK: Final = {
    "cniVersion": "0.4.0",
    "name": "node",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": "10.244.0.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}
_CONTAINERD: Final = """\
version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-state"
[grpc]
address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:1"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{programs}/usr/lib/cni"
conf_dir = "{folder}/network"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{runc}"
"""


@dataclass(frozen=True, slots=True)
class Node:
    """A running cluster of one node."""

    folder: Path
    pid: int
    """The first process of the node's namespaces, as seen outside."""

    @classmethod
    @contextmanager
    def running(cls, archives: Sequence[Path]) -> Iterator[Self]:
        """Start a cluster whose node has these images; afterwards nothing of it runs, is mounted or is stored."""
        assert (PLACE / ".ready").exists(), "run make test-cluster, which builds what this needs"
        with _made_folder() as folder:
            _prepare(folder)
            with _started(folder) as pid:
                node = cls(folder, pid)
                for archive in (PLACE / "pause.tar", *archives):
                    node._load(archive)
                node.until(node._is_ready)
                yield node

    def inside(self, *command: str | Path, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        """Carry out a command, which may fail, in the node's network."""
        return _inside(self.pid, *command, stdin=stdin)

    def kubectl(self, *command: str, stdin: str = "") -> str:
        """Carry out a command of kubectl, which must succeed, and return what it prints."""
        done = self._kubectl(*command, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(command)}: {done.stderr}"
        return done.stdout

    def apply(self, *documents: Document) -> None:
        """Make or change what the documents describe."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.kubectl("apply", "--filename=-", stdin=json.dumps(listed))

    def get(self, *what: str) -> Any:
        """Return what the cluster knows about something."""
        return json.loads(self.kubectl("get", "--output=json", *what))

    def follow(self, pod: str, namespace: str, container: str) -> "subprocess.Popen[str]":
        """Read the log of a pod's container to its end, also once the pod is gone."""
        kubectl = ["kubectl", f"--kubeconfig={self.folder}/kubeconfig", f"--namespace={namespace}"]
        logs = ["logs", "--follow", pod, container]
        return subprocess.Popen(
            ["nsenter", f"--target={self.pid}", "--net", *kubectl, *logs],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def cgroup(self, pod: Document, container: str, controller: str = "memory") -> Path:
        """Return the control group of a pod's running container."""
        statuses = pod["status"]["containerStatuses"]
        (full,) = [one["containerID"] for one in statuses if one["name"] == container]
        assert full, f"{container} has not started"
        root = _CGROUPS / controller / self.folder.name
        (found,) = root.glob(f"kubepods/**/{full.rpartition('/')[2]}")
        return found

    def until(self, look: Callable[[], T | None]) -> T:
        """Repeat `look` until it returns something, within the time that anything may take."""
        end = time.monotonic() + SECONDS_MAX
        while (found := look()) is None:
            assert Path(f"/proc/{self.pid}").exists(), f"the node has ended: {self._said()}"
            assert time.monotonic() < end, f"it does not come: {self._said()}"
            time.sleep(_POLL_SECONDS)
        return found

    def _load(self, archive: Path) -> None:
        socket = self.folder / "containerd.sock"
        ctr = PLACE / "debian" / "usr" / "bin" / "ctr"
        self.until(lambda: True if socket.exists() else None)
        command: list[str | Path] = [
            ctr,
            "--address",
            socket,
            "--namespace",
            "k8s.io",
            "images",
            "import",
            archive,
        ]
        done = self.inside(*command)
        assert done.returncode == 0, done.stderr

    def _is_ready(self) -> bool | None:
        done = self._kubectl("get", "node", "node", "--output=json")
        account = self._kubectl("get", "serviceaccount", "default")
        if done.returncode or account.returncode:
            return None
        conditions = json.loads(done.stdout)["status"]["conditions"]
        return {"Ready": "True"}.items() <= {
            one["type"]: one["status"] for one in conditions
        }.items() or None

    def _kubectl(self, *command: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        kubeconfig = f"--kubeconfig={self.folder}/kubeconfig"
        return self.inside("kubectl", kubeconfig, *command, stdin=stdin)

    def _said(self) -> str:
        pods = self._kubectl("get", "pods", "--all-namespaces").stdout
        events = self._kubectl("get", "events", "--all-namespaces").stdout[-2000:]
        logs = [
            f"{log.name}: {log.read_text()[-500:]}" for log in sorted(self.folder.glob("log/*"))
        ]
        return "\n".join([pods, events, *logs])


def processes_of(cgroup: Path) -> list[int]:
    """Return the processes of a control group, as seen outside, the first of their namespace first."""
    pids = [int(line) for line in (cgroup / "cgroup.procs").read_text().split()]
    return sorted(pids, key=_pid_inside)


def _pid_inside(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (inside,) = [line.split()[-1] for line in lines if line.startswith("NSpid:")]
    return int(inside)


@contextmanager
def _made_folder() -> Iterator[Path]:
    """Give a directory and control groups of its name, and remove them, also those that killed runs have left."""
    for left in _PARENT.glob(f"{_PREFIX}*"):
        with _lock(left) as is_locked:
            if is_locked:
                _remove(left)
    # A socket's path must be short, and users of containers must come into the directory.
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PARENT))
    folder.chmod(0o755)
    with _lock(folder):
        try:
            for cgroup in _cgroups_of(folder):
                _make_cgroup(cgroup)
            yield folder
        finally:
            _remove(folder)


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Lock a directory, unless a living process has; the kernel unlocks what ended ones had."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = True
    except BlockingIOError:
        is_locked = False
    try:
        yield is_locked
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    for cgroup in _cgroups_of(folder):
        _remove_cgroup(cgroup)
    shutil.rmtree(folder)


def _prepare(folder: Path) -> None:
    for name in ("log", "network"):
        (folder / name).mkdir()
    (folder / "kubeconfig").write_text(json.dumps(_KUBECONFIG))
    (folder / "network" / "node.conflist").write_text(json.dumps(_NETWORK))
    (folder / "tokens.csv").write_text('of-the-tests,admin,1,"system:masters"\n')
    known = {"folder": folder, "programs": PLACE / "debian", "runc": _HERE / "runc.sh"}
    (folder / "containerd.toml").write_text(_CONTAINERD.format(**known))
    key = ["openssl", "genrsa", "-out", str(folder / "accounts.key"), "2048"]
    subprocess.run(key, check=True, capture_output=True)


@contextmanager
def _started(folder: Path) -> Iterator[int]:
    programs = [PLACE / "bin", *(PLACE / "debian" / name for name in ("usr/bin", "usr/sbin"))]
    path = ":".join([*map(str, programs), os.environ["PATH"], "/usr/sbin", "/sbin"])
    own = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with (
        (folder / "log" / "node").open("w") as log,
        subprocess.Popen(
            ["unshare", *own, "bash", _HERE / "node.sh", folder],
            stdin=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PATH": path, "ADDRESS": _ADDRESS, "CGROUP": f"/{folder.name}"},
        ) as process,
    ):
        pid = _first_child(process.pid)
        try:
            yield pid
        finally:
            # Its end is that of all others, and is told only when they have ended.
            os.kill(pid, signal.SIGKILL)


def _first_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    end = time.monotonic() + SECONDS_MAX
    while not (found := children.read_text().split()):
        assert time.monotonic() < end, "the node does not start"
        time.sleep(_POLL_SECONDS)
    return int(found[0])


def _inside(pid: int, *command: str | Path, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["nsenter", f"--target={pid}", "--net", *command],
        capture_output=True,
        text=True,
        check=False,
        input=stdin,
    )


def _cgroups_of(folder: Path) -> list[Path]:
    assert (_CGROUPS / "memory").is_dir(), "control groups of version 1 are needed"
    return [
        controller / folder.name
        for controller in _CGROUPS.iterdir()
        if controller.is_dir() and not controller.is_symlink()
    ]


def _make_cgroup(cgroup: Path) -> None:
    cgroup.mkdir()
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (parents := cgroup.parent / name).exists():
            (cgroup / name).write_text(parents.read_text())


def _remove_cgroup(cgroup: Path) -> None:
    if not cgroup.exists():
        return
    for inner in sorted(cgroup.rglob("*/"), key=lambda path: len(path.parts), reverse=True):
        if inner.is_dir():
            inner.rmdir()
    cgroup.rmdir()
