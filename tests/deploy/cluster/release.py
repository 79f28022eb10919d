"""Own the chart as a cluster runs it: what Helm renders, the secrets that it names, and a worker beside the daemon."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from tests.deploy.cluster.node import Node, processes_of
from tests.deploy.containers.images import NAME
from tests.deploy.containers.orders import ordered
from tests.deploy.containers.pods import PROGRAM
from tests.deploy.tools import Document, Helm
from tests.unit.api.certificates import Authority

NAMESPACE: Final = "inference"
MIB: Final = 1 << 20
DEVICE_MIB: Final = 512
HOST_MIB: Final = 256
ROLES: Final = ("joiner", "operator", "reader")
_USER: Final = 10001
_REPOSITORY, _, _TAG = NAME.rpartition(":")
OF_ANY_MODE: Final = {
    "image": {"repository": _REPOSITORY, "tag": _TAG, "pullPolicy": "Never"},
    "probes": {
        "startup": {"periodSeconds": 1},
        "liveness": {"periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 3},
        "readiness": {"periodSeconds": 1},
    },
    "terminationGracePeriodSeconds": 20,
    "resources": {"cpuRequest": "200m"},
}
"""Values of a small daemon of our own image, whose end the kubelet finds out in seconds."""
_PROGRAMS: Final = (Path(__file__).with_name("filler.py"), PROGRAM)


@dataclass(frozen=True, slots=True)
class Release:
    """The release that a cluster runs, with a worker that has nothing but the node's directory in common with it."""

    node: Node
    helm: Helm
    authority: Authority
    """Who signed the daemon's first certificate."""

    @classmethod
    @contextmanager
    def running(cls, node: Node, helm: Helm, secrets: Path) -> Iterator[Self]:
        """Install the chart and start a worker."""
        release = cls(node, helm, Authority(secrets))
        (release._folder / "disk").mkdir(mode=0o700)
        os.chown(release._folder / "disk", _USER, _USER)
        node.kubectl("create", "namespace", NAMESPACE)
        release.put_certificate(release.authority)
        for role in ROLES:
            release.put_token(role, f"first-token-of-the-{role}")
        release.install()
        node.until(lambda: release._accounts() or None)
        node.apply(*release._worker_documents())
        node.until(lambda: release.try_to_order("who"))
        yield release

    def install(self, **settings: object) -> None:
        """Apply what Helm renders, with other settings of the daemon than before."""
        rendered = self.helm.render(self._values(settings))
        self.node.apply(*(one for one in rendered.documents if one["kind"] != "Pod"))
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the only daemon is of the newest settings, and has said that it is ready."""
        self.node.until(lambda: self._is_rolled_out() or None)

    def daemon(self) -> Document:
        """Return the only pod of the daemon, which is not about to end."""
        selector = "--selector=app.kubernetes.io/component=daemon"
        pods = self.node.get("pods", f"--namespace={NAMESPACE}", selector)["items"]
        (found,) = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        known: Document = found
        return known

    def pod(self, name: str) -> Document:
        """Return a pod by its name."""
        found: Document = self.node.get("pod", name, f"--namespace={NAMESPACE}")
        return found

    def daemon_cgroup(self) -> Path:
        """Return the control group of memory of the daemon's container."""
        return self.node.cgroup(self.daemon(), "kvleased")

    def wait_until_restarted(self, num_restarts: int, epoch: int) -> None:
        """Wait until the daemon's container was started so many times anew, and the worker has gone on from an epoch.

        By that order the worker reads its memory again, as it must when it has gone on.
        """
        self.node.until(lambda: self._has_restarted(num_restarts) or None)
        self.node.until(lambda: self.order("who")["epoch"] > epoch or None)

    def num_restarts(self) -> int:
        """Count the restarts of the containers of the daemon's pod."""
        return sum(one["restartCount"] for one in self.daemon()["status"]["containerStatuses"])

    def log(self) -> str:
        """Return the log of the daemon's container."""
        pod = self.daemon()["metadata"]["name"]
        return self.node.kubectl("logs", f"--namespace={NAMESPACE}", pod, "--container=kvleased")

    def execute(self, pod: str, *command: str) -> str:
        """Carry out a command in a pod's container, and return what it prints."""
        return self.node.kubectl("exec", f"--namespace={NAMESPACE}", pod, "--", *command)

    def volume_bytes(self, volume: str) -> int | None:
        """Return what a volume of the daemon's pod has in it, as the kubelet has last measured."""
        summary = json.loads(
            self.node.kubectl("get", "--raw=/api/v1/nodes/node/proxy/stats/summary")
        )
        name = self.daemon()["metadata"]["name"]
        (pod,) = [one for one in summary["pods"] if one["podRef"]["name"] == name]
        measured = {one["name"]: one["usedBytes"] for one in pod.get("volume", ())}
        return measured.get(volume)

    def size_limit(self, volume: str) -> int:
        """Return the bytes that a volume of the daemon's pod may have."""
        volumes = self.daemon()["spec"]["volumes"]
        (limit,) = [one["emptyDir"]["sizeLimit"] for one in volumes if one["name"] == volume]
        return int(limit.removesuffix("Mi")) * MIB

    def put_certificate(self, authority: Authority) -> None:
        """Make or change the secret that has the daemon's certificate and key."""
        pair = authority.sign("server")
        files = {"tls.crt": pair.cert_file.read_text(), "tls.key": pair.key_file.read_text()}
        self._put_secret("kvlease-tls", "kubernetes.io/tls", files)

    def put_token(self, role: str, token: str) -> None:
        """Make or change the secret that has the token of a role."""
        self._put_secret(f"kvlease-{role}", "Opaque", {"token": token})

    def status_of_call(self, trusted: Authority, token: str) -> int | None:
        """Return HTTP's status of a call to the daemon's address, or nothing if its certificate is not trusted."""
        address = self.daemon()["status"]["podIP"]
        asked: list[str | Path] = [
            "--connect-to",
            f"localhost:7070:{address}:7070",
            "--cacert",
            trusted.cert_file,
        ]
        said = ["--silent", "--output", "/dev/null", "--write-out", "%{http_code}"]
        bearer = ["--header", f"Authorization: Bearer {token}"]
        done = self.node.inside("curl", *asked, *said, *bearer, "https://localhost:7070/v1/stats")
        return int(done.stdout) or None

    def order(self, do: str, **order: object) -> dict[str, Any]:
        """Send the worker an order, and return its answer."""
        told = self.node.until(lambda: self.try_to_order(do, **order))
        assert "error" not in told, told["error"]
        return told

    def try_to_order(self, do: str, **order: object) -> dict[str, Any] | None:
        """Send the worker an order, and return its answer, or nothing while it has not attached."""
        worker = self.pod("worker")
        if worker["status"]["phase"] != "Running":
            return None
        return ordered(processes_of(self.node.cgroup(worker, "worker"))[0], do, **order)

    def test_pod(self) -> Document:
        """Return the pod that `helm test` runs."""
        return self.helm.render(self._values({})).one("Pod")

    @property
    def _folder(self) -> Path:
        return self.node.folder

    def _values(self, settings: Mapping[str, object]) -> Document:
        """Return values of a small daemon, whose end the kubelet finds out in seconds."""
        return {
            "mode": "daemonset",
            "pools": {
                "deviceMiB": DEVICE_MIB,
                "hostMiB": HOST_MIB,
                "diskMiB": 64,
                "hostOutlivesContainer": True,
            },
            "disk": {"kind": "hostPath", "path": str(self._folder / "disk")},
            "daemonset": {"hostPath": str(self._folder / "daemon")},
            "tls": {"existingSecret": "kvlease-tls"},
            "tokens": {f"{role}Secret": f"kvlease-{role}" for role in ROLES},
            **OF_ANY_MODE,
            "settings": {"lease_seconds": 20, **settings},
        }

    def _worker_documents(self) -> list[Document]:
        """Return a worker that is locked, reaches the daemon and is placed as the chart's test is, but goes on."""
        data = {program.name: program.read_text() for program in _PROGRAMS}
        metadata = {"namespace": NAMESPACE}
        programs = {"apiVersion": "v1", "kind": "ConfigMap", "data": data}
        programs["metadata"] = {**metadata, "name": "programs"}
        pod = deepcopy(self.test_pod())
        pod["metadata"] = {**metadata, "name": "worker"}
        pod["spec"]["terminationGracePeriodSeconds"] = 1
        (worker,) = pod["spec"]["containers"]
        worker["name"] = "worker"
        worker["command"] = ["python", "/programs/worker.py", "/tmp/orders"]
        worker["volumeMounts"].append({"name": "programs", "mountPath": "/programs"})
        pod["spec"]["volumes"].append({"name": "programs", "configMap": {"name": "programs"}})
        return [programs, pod]

    def _put_secret(self, name: str, kind: str, data: Mapping[str, str]) -> None:
        metadata = {"name": name, "namespace": NAMESPACE}
        made = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": kind}
        self.node.apply({**made, "stringData": dict(data)})

    def _accounts(self) -> list[Document]:
        known = self.node.get("serviceaccounts", f"--namespace={NAMESPACE}")
        found: list[Document] = known["items"]
        return found

    def _is_rolled_out(self) -> bool:
        (known,) = self.node.get("daemonsets", f"--namespace={NAMESPACE}")["items"]
        status = known["status"]
        return bool(
            status.get("observedGeneration") == known["metadata"]["generation"]
            and status.get("updatedNumberScheduled") == status.get("numberReady") == 1
        )

    def _has_restarted(self, num_restarts: int) -> bool:
        (status,) = self.daemon()["status"]["containerStatuses"]
        return bool(status["restartCount"] == num_restarts and status["ready"])
