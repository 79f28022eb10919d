"""Own a pod of daemon and worker: derived from one that we ship, run by the engine, and ordered about by tests."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from tests.deploy.containers.engine import Engine, child_of
from tests.deploy.containers.images import NAME
from tests.deploy.containers.orders import ordered
from tests.deploy.tools import Document

PROGRAM: Final = Path(__file__).with_name("worker.py")


def runnable(pod: Document, settings: Mapping[str, str]) -> Document:
    """Return a shipped pod in a form that this engine can run, with our own images and small pools.

    The engine knows no native sidecars, so the daemon is a container like the worker's, and only the test restarts it.
    Nothing that locks the containers is changed.
    """
    made = deepcopy(pod)
    spec = made["spec"]
    (daemon,) = [one for one in spec.pop("initContainers") if one["name"] == "kvleased"]
    (worker,) = spec["containers"]
    assert daemon.pop("restartPolicy") == "Always"
    spec["restartPolicy"] = "Never"
    spec["containers"] = [daemon, worker]
    worker["name"] = "worker"
    for container in (daemon, worker):
        container["image"] = NAME
        container["resources"] = {"limits": {"memory": "1Gi"}}
        # Nobody connects from outside, and an engine without systemd calls no probes; the tests call them.
        for field in ("ports", "startupProbe", "livenessProbe", "readinessProbe"):
            container.pop(field, None)
    daemon["env"] = [one for one in daemon["env"] if one["name"] not in settings]
    daemon["env"] += [{"name": name, "value": value} for name, value in settings.items()]
    worker["command"] = ["python", "/program/worker.py", "/tmp/orders"]
    worker.pop("args", None)
    worker["volumeMounts"].append({"name": "program", "mountPath": "/program"})
    spec["volumes"].append({"name": "program", "configMap": {"name": "program"}})
    return made


@dataclass(frozen=True, slots=True)
class Pod:
    """A running pod."""

    engine: Engine
    name: str

    @classmethod
    @contextmanager
    def running(cls, engine: Engine, document: Document, folder: Path) -> Iterator[Self]:
        """Run a pod whose network has only its own loopback, and end it afterwards."""
        program = {"worker.py": PROGRAM.read_text()}
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "program"}}
        (folder / "program.yaml").write_text(json.dumps({**made, "data": program}))
        (folder / "pod.yaml").write_text(json.dumps(document))
        options = ["--network=none", f"--configmap={folder / 'program.yaml'}"]
        pod = cls(engine, document["metadata"]["name"])
        try:
            engine.do("play", "kube", *options, str(folder / "pod.yaml"))
            pod.wait_until_ready()
            yield pod
        finally:
            engine.try_to("pod", "rm", "--force", "--time=0", pod.name)
            engine.try_to("volume", "prune", "--force")

    @property
    def daemon(self) -> str:
        """Return the name of the daemon's container."""
        return f"{self.name}-kvleased"

    @property
    def worker(self) -> str:
        """Return the name of the worker's container."""
        return f"{self.name}-worker"

    def wait_until_ready(self) -> None:
        """Wait until the daemon can grant and the worker has attached."""
        self.engine.until(self.daemon, lambda: self._probe("readyz") or None)
        self.engine.until(self.worker, lambda: self._try_to_order("who"))

    def order(self, do: str, **order: object) -> dict[str, Any]:
        """Send the worker an order, and return its answer."""
        told = self._try_to_order(do, **order)
        assert told is not None, f"{self.worker} is silent: {self.engine.logs(self.worker)}"
        assert "error" not in told, told["error"]
        return told

    def stats(self) -> dict[str, Any]:
        """Return the figures that the command line prints in the daemon's container."""
        text = self.engine.do("exec", self.daemon, "kvlease", "status", "--json")
        (cache,) = json.loads(text)["caches"]
        found: dict[str, Any] = cache
        return found

    def kill(self, container: str) -> None:
        """Kill a container's first process and thereby all of them, as a lack of memory or an operator would."""
        pid = self.engine.pid(container)
        os.kill(pid, signal.SIGKILL)
        self.engine.do("wait", container)

    def kill_control(self) -> None:
        """Kill the daemon's control process, and wait until there is another."""
        supervisor = self.engine.pid(self.daemon)
        control = child_of(supervisor, "control")
        assert control is not None
        os.kill(control, signal.SIGKILL)
        self.engine.until(self.daemon, lambda: _other(child_of(supervisor, "control"), control))

    def restart(self, container: str) -> None:
        """Restart an ended container, as a kubelet does."""
        self.engine.do("start", container)

    def _probe(self, probe: str) -> bool:
        done = self.engine.try_to("exec", self.daemon, "kvleased", "probe", probe)
        return done.returncode == 0

    def _try_to_order(self, do: str, **order: object) -> dict[str, Any] | None:
        return ordered(self.engine.pid(self.worker), do, **order)


def device_of(stats: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the device pool's blocks by state."""
    (device,) = [pool for pool in stats["pools"] if pool["tier"] == "device"]
    blocks: Mapping[str, int] = device
    return blocks


def reusable(stats: Mapping[str, Any]) -> int:
    """Count the device blocks that the next request can get."""
    device = device_of(stats)
    return device["free"] + device["ready"] - device["ready_held"]


def _other(found: int | None, than: int) -> int | None:
    return None if found == than else found
