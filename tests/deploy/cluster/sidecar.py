"""Own the chart's pod of engine and daemon as a cluster runs it: what Helm renders, with a worker as the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, Self

from tests.deploy.cluster.node import Node, processes_of
from tests.deploy.cluster.release import NAMESPACE, OF_ANY_MODE
from tests.deploy.containers.orders import ordered
from tests.deploy.containers.pods import PROGRAM
from tests.deploy.tools import Document, Helm

_VALUES: Final = {
    "mode": "sidecar",
    "pools": {"deviceMiB": 64, "hostMiB": 64, "hostOutlivesContainer": True},
    **OF_ANY_MODE,
    # No lease runs out while these tests run: blocks become free only by the proof of an end.
    "settings": {"lease_seconds": 3600, "heartbeat_seconds": 5},
    "engine": {
        "image": OF_ANY_MODE["image"],
        "kvCacheMiB": 256,
        "resources": {"cpuRequest": "200m", "memoryMiB": 2048},
    },
}


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The only pod of the chart's Deployment, in a cluster whose kubelet knows no native sidecars."""

    node: Node

    @classmethod
    @contextmanager
    def running(cls, node: Node, helm: Helm) -> Iterator[Self]:
        """Install the chart, and wait until daemon and worker are ready."""
        node.kubectl("create", "namespace", NAMESPACE)
        node.until(lambda: node.get("serviceaccounts", f"--namespace={NAMESPACE}")["items"] or None)
        deployment = _runnable(helm.render(_VALUES).one("Deployment"))
        data = {PROGRAM.name: PROGRAM.read_text()}
        metadata = {"namespace": NAMESPACE, "name": "program"}
        node.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data},
            deployment,
        )
        sidecar = cls(node)
        sidecar.wait_until_ready()
        yield sidecar

    def pod(self) -> Document:
        """Return the pod that is not about to end."""
        pods = self.node.get("pods", f"--namespace={NAMESPACE}")["items"]
        (found,) = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        known: Document = found
        return known

    def container(self, name: str) -> Document:
        """Return what the kubelet knows of a container."""
        (found,) = [one for one in self.pod()["status"]["containerStatuses"] if one["name"] == name]
        known: Document = found
        return known

    def processes(self, container: str) -> list[int]:
        """Return the processes of a container, its first one first."""
        return processes_of(self.node.cgroup(self.pod(), container))

    def wait_until_ready(self) -> None:
        """Wait until the kubelet finds the pod ready, and the worker has attached."""
        self.node.until(lambda: self._is_ready() or None)
        self.node.until(lambda: self._try_to_order("who"))

    def wait_until_restarted(self, container: str, num_restarts: int) -> None:
        """Wait until a container was started so many times anew, and everything is ready again."""
        self.node.until(lambda: self.container(container)["restartCount"] == num_restarts or None)
        self.wait_until_ready()

    def order(self, do: str, **order: object) -> dict[str, Any]:
        """Send the worker an order, and return its answer."""
        told = self.node.until(lambda: self._try_to_order(do, **order))
        assert "error" not in told, told["error"]
        return told

    def execute(self, *command: str) -> str:
        """Carry out a command in the daemon's container, and return what it prints."""
        name = self.pod()["metadata"]["name"]
        where = [f"--namespace={NAMESPACE}", name, "--container=kvleased"]
        return self.node.kubectl("exec", *where, "--", *command)

    def _is_ready(self) -> bool:
        pods = self.node.get("pods", f"--namespace={NAMESPACE}")["items"]
        kept = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        statuses = [one for pod in kept for one in pod["status"].get("containerStatuses", ())]
        return len(kept) == 1 and len(statuses) == 2 and all(one["ready"] for one in statuses)

    def _try_to_order(self, do: str, **order: object) -> dict[str, Any] | None:
        if "running" not in self.container("engine")["state"]:
            return None
        return ordered(self.processes("engine")[0], do, **order)


def _runnable(deployment: Document) -> Document:
    """Return the chart's Deployment in a form for a cluster without native sidecars, whose engine is a worker.

    The daemon is a container like the engine's, with the probes, limits, volumes and locks that the chart gives it. The
    worker serves no HTTP, so the probes of the engine go.
    """
    made = deepcopy(deployment)
    spec = made["spec"]["template"]["spec"]
    (daemon,) = [one for one in spec["initContainers"] if one["name"] == "kvleased"]
    (engine,) = spec["containers"]
    spec["initContainers"].remove(daemon)
    assert daemon.pop("restartPolicy") == "Always"
    spec["containers"] = [daemon, engine]
    for field in ("ports", "startupProbe", "livenessProbe", "readinessProbe", "args"):
        del engine[field]
    engine["command"] = ["python", "/program/worker.py", "/tmp/orders"]
    engine["volumeMounts"].append({"name": "program", "mountPath": "/program"})
    spec["volumes"].append({"name": "program", "configMap": {"name": "program"}})
    made["metadata"]["namespace"] = NAMESPACE
    return made
