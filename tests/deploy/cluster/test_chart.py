"""Laws of the chart's DaemonSet under a kubelet: it is ready by its probes, and workers outlive every end of it."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.cluster.node import Node, processes_of
from tests.deploy.cluster.release import DEVICE_MIB, HOST_MIB, MIB, NAMESPACE, Release
from tests.deploy.containers.images import Image
from tests.deploy.tools import Helm
from tests.unit.api.certificates import Authority

pytestmark = pytest.mark.cluster

_TOKENS: Final = 160
_FOUND_MIN: Final = _TOKENS - 16
"""The last token's block is always computed, to have its logits."""


@pytest.fixture(scope="module")
def release(
    image: Image, helm: Helm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Release]:
    """Run the chart in a cluster of its own."""
    with (
        Node.running([image.archive]) as node,
        Release.running(node, helm, tmp_path_factory.mktemp("secrets")) as running,
    ):
        yield running


def test_daemon_becomes_ready_by_its_probes(release: Release) -> None:
    """The kubelet finds the daemon started, ready and alive, and what the notes say shows it."""
    pod = release.daemon()
    (status,) = pod["status"]["containerStatuses"]
    shown = release.execute("ds/rel-kvlease", "kvlease", "status", "--json")

    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(pod["spec"]["containers"][0])
    assert (status["started"], status["ready"], status["restartCount"]) == (True, True, 0)
    assert [cache["num_workers"] for cache in json.loads(shown)["caches"]] == [1]


def test_worker_attaches_over_the_nodes_directory(release: Release) -> None:
    """A pod that shares only a directory of the node with the daemon maps its pool, and finds what it wrote."""
    told = release.order("who")
    first = release.order("serve", prompt=1, num_tokens=_TOKENS)
    second = release.order("serve", prompt=1, num_tokens=_TOKENS)

    assert (told["pid"], told["others"], told["uid"]) == (1, [1], 10001)
    assert told["death_proof"] == "pidfd"
    assert told["bytes_mapped"] > 0
    assert (first["device_hit_tokens"], first["wrong_blocks"]) == (0, 0)
    assert second["device_hit_tokens"] >= _FOUND_MIN
    assert second["wrong_blocks"] == 0


def test_evicted_blocks_come_back_from_the_host_pool(release: Release) -> None:
    """What is moved out of the device pool is found in the pod's tmpfs, byte for byte."""
    release.order("serve", prompt=2, num_tokens=_TOKENS)
    evicted = release.order("evict")
    found = release.order("serve", prompt=2, num_tokens=_TOKENS)

    assert evicted["num_evicted"] > 0
    assert found["host_hit_tokens"] >= _FOUND_MIN
    assert found["wrong_blocks"] == 0


def test_killed_daemon_is_started_anew_with_its_host_pool(release: Release) -> None:
    """After SIGKILL of its first process the kubelet starts the daemon anew, and the worker finds what was evicted."""
    before = release.order("serve", prompt=3, num_tokens=_TOKENS)
    release.order("evict")
    num_restarts = release.num_restarts()

    os.kill(processes_of(release.daemon_cgroup())[0], signal.SIGKILL)
    release.wait_until_restarted(num_restarts + 1, before["epoch"])
    found = release.order("serve", prompt=3, num_tokens=_TOKENS)

    assert found["epoch"] > before["epoch"]
    assert found["host_hit_tokens"] >= _FOUND_MIN
    assert found["wrong_blocks"] == 0


def test_stopped_daemon_is_ended_by_its_liveness_probe(release: Release) -> None:
    """A daemon whose processes do nothing is ended by the kubelet, and what was evicted is found in the next."""
    before = release.order("serve", prompt=4, num_tokens=_TOKENS)
    release.order("evict")
    num_restarts = release.num_restarts()

    for pid in processes_of(release.daemon_cgroup()):
        os.kill(pid, signal.SIGSTOP)
    release.wait_until_restarted(num_restarts + 1, before["epoch"])
    found = release.order("serve", prompt=4, num_tokens=_TOKENS)

    assert found["epoch"] > before["epoch"]
    assert found["host_hit_tokens"] >= _FOUND_MIN
    assert found["wrong_blocks"] == 0


def test_renewed_secrets_are_taken_while_the_daemon_runs(release: Release, tmp_path: Path) -> None:
    """The daemon serves a renewed certificate and lets in renewed tokens, and neither restarts nor ends what it has."""
    renewed = Authority(tmp_path)
    release.order("serve", prompt=5, num_tokens=_TOKENS)
    num_restarts = release.num_restarts()
    before = release.status_of_call(release.authority, "first-token-of-the-reader")

    release.put_certificate(renewed)
    release.put_token("reader", "second-token-of-the-reader")
    release.node.until(
        lambda: release.status_of_call(renewed, "second-token-of-the-reader") == 200 or None
    )
    found = release.order("serve", prompt=5, num_tokens=_TOKENS)

    assert before == 200
    assert release.status_of_call(renewed, "first-token-of-the-reader") == 401
    assert release.status_of_call(release.authority, "second-token-of-the-reader") is None
    assert release.num_restarts() == num_restarts
    assert found["device_hit_tokens"] >= _FOUND_MIN
    assert found["wrong_blocks"] == 0


def test_changed_setting_drains_the_old_daemon_first(release: Release) -> None:
    """A new setting replaces the pod once the old daemon has drained, and the same worker goes on with the next."""
    old = release.daemon()["metadata"]["name"]
    before = release.order("serve", prompt=6, num_tokens=_TOKENS)

    with release.node.follow(old, NAMESPACE, "kvleased") as log:
        release.install(lease_seconds=30)
        said = log.communicate()[0]
    release.order("who")
    first = release.order("serve", prompt=6, num_tokens=_TOKENS)
    second = release.order("serve", prompt=6, num_tokens=_TOKENS)

    events = [json.loads(line)["event"] for line in said.splitlines() if line.startswith("{")]
    assert events.index("draining") < events.index("drained")
    assert release.daemon()["metadata"]["name"] != old
    assert first["epoch"] != before["epoch"]
    assert second["device_hit_tokens"] >= _FOUND_MIN
    assert (first["wrong_blocks"], second["wrong_blocks"]) == (0, 0)
    assert release.pod("worker")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_test_of_the_release_succeeds(release: Release) -> None:
    """The pod that `helm test` runs ends well."""
    pod = release.test_pod()
    release.node.apply(pod)
    name = pod["metadata"]["name"]
    ended = ("Succeeded", "Failed")
    status = release.node.until(
        lambda: known if (known := release.pod(name)["status"])["phase"] in ended else None
    )

    assert status["phase"] == "Succeeded"


def test_full_pools_stay_within_the_pods_limits(release: Release) -> None:
    """The daemon's pod pays for pools that a worker fills to the last block, and exceeds no limit of its own."""
    cgroup = release.daemon_cgroup()
    num_restarts = release.num_restarts()
    # The worker's own cache has the rest.
    wanted = [(DEVICE_MIB - 2) * MIB, (HOST_MIB - 16) * MIB]

    told = release.execute("worker", "python", "/programs/filler.py", *map(str, wanted))
    measured = release.node.until(
        lambda: (
            known if (known := release.volume_bytes("kvlease-host") or 0) > HOST_MIB * MIB else None
        )
    )
    highest, limit = (
        int((cgroup / f"memory.{name}_in_bytes").read_text()) for name in ("max_usage", "limit")
    )
    release.execute("worker", "kvlease", "delete", "of-the-filler")

    assert [free for free, _ in json.loads(told).values()] == [0, 0]
    assert sum(wanted) < highest < limit
    # The kubelet evicts a pod above this.
    assert measured < release.size_limit("kvlease-host")
    assert "oom_kill 0" in (cgroup / "memory.oom_control").read_text().splitlines()
    assert release.num_restarts() == num_restarts
