"""Laws of the cluster itself: a machine is after its end as it was before."""

from pathlib import Path
from typing import Final

import pytest

from tests.deploy.cluster.node import Node

pytestmark = pytest.mark.cluster

_POD: Final = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "only"},
    "spec": {
        "automountServiceAccountToken": False,
        "containers": [
            {"name": "only", "image": "localhost/pause:1", "imagePullPolicy": "Never"},
        ],
    },
}


def test_node_leaves_nothing_behind() -> None:
    """While a pod runs only processes, control groups and a directory are the node's, and none after its end."""
    kernels = _settings_of_the_kernel()
    with Node.running([]) as node:
        node.apply(_POD)
        node.until(lambda: node.get("pod", "only")["status"]["phase"] == "Running" or None)
        name = node.folder.name
        during = _traces(name)

    assert set(during) == {"processes", "cgroups", "directory"}
    assert _traces(name) == {}
    assert _settings_of_the_kernel() == kernels


def _traces(name: str) -> dict[str, list[str]]:
    """Return what the machine has of a node, by its kind."""
    found = {
        "processes": [
            line for path in Path("/proc").glob("[0-9]*/cmdline") if name in (line := _read(path))
        ],
        "mounts": [
            line for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line
        ],
        "cgroups": [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{name}")],
        "directory": [str(path) for path in Path("/tmp").glob(name)],
    }
    return {kind: traces for kind, traces in found.items() if traces}


def _settings_of_the_kernel() -> list[str]:
    names = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
    return [_read(Path("/proc/sys") / name) for name in names]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
