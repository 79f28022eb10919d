"""Laws of the chart's pod of engine and daemon under a kubelet: each container outlives every end of the other."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Final

import pytest

from tests.deploy.cluster.node import Node
from tests.deploy.cluster.release import NAMESPACE
from tests.deploy.cluster.sidecar import Sidecar
from tests.deploy.containers.images import Image
from tests.deploy.tools import Helm

pytestmark = pytest.mark.cluster

_TOKENS: Final = 160
_FOUND_MIN: Final = _TOKENS - 16
"""The last token's block is always computed, to have its logits."""


@pytest.fixture(scope="module")
def sidecar(image: Image, helm: Helm) -> Iterator[Sidecar]:
    """Run the pod in a cluster of its own."""
    with Node.running([image.archive]) as node, Sidecar.running(node, helm) as running:
        yield running


def test_pod_becomes_ready_by_its_probes(sidecar: Sidecar) -> None:
    """The kubelet finds the daemon started and ready, and the worker has its memory over the pod's directory."""
    daemon = sidecar.container("kvleased")
    told = sidecar.order("who")
    shown = json.loads(sidecar.execute("kvlease", "status", "--json"))

    assert (daemon["started"], daemon["ready"], daemon["restartCount"]) == (True, True, 0)
    assert (told["pid"], told["others"], told["uid"]) == (1, [1], 10001)
    assert told["death_proof"] == "pidfd"
    assert told["bytes_mapped"] > 0
    assert [cache["num_workers"] for cache in shown["caches"]] == [1]


def test_killed_engine_gives_its_blocks_back(sidecar: Sidecar) -> None:
    """The kubelet starts a killed engine anew, which finds what the last one committed; the daemon runs on."""
    sidecar.order("serve", prompt=1, num_tokens=_TOKENS)
    held = sidecar.order("hold", prompt=2, num_tokens=_TOKENS, num_committed=_TOKENS // 2)

    os.kill(sidecar.processes("engine")[0], signal.SIGKILL)
    sidecar.wait_until_restarted("engine", 1)
    (cache,) = json.loads(sidecar.execute("kvlease", "status", "--json"))["caches"]
    whole = sidecar.order("serve", prompt=1, num_tokens=_TOKENS)
    half = sidecar.order("serve", prompt=2, num_tokens=_TOKENS)

    assert held["num_blocks"] > 0
    assert (cache["num_workers"], cache["num_leases"]) == (1, 0)
    assert whole["device_hit_tokens"] >= _FOUND_MIN
    assert half["device_hit_tokens"] == _TOKENS // 2
    assert (whole["wrong_blocks"], half["wrong_blocks"]) == (0, 0)
    assert sidecar.container("kvleased")["restartCount"] == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ended_daemon_is_started_anew_with_its_host_pool(sidecar: Sidecar, number: int) -> None:
    """The kubelet starts a killed or stopped daemon anew; the engine runs on, and finds what was evicted."""
    before = sidecar.order("serve", prompt=3, num_tokens=_TOKENS)
    sidecar.order("evict")
    num_restarts = sidecar.container("kvleased")["restartCount"]
    num_of_engine = sidecar.container("engine")["restartCount"]

    processes = sidecar.processes("kvleased")
    for pid in processes[:1] if number == signal.SIGKILL else processes:
        os.kill(pid, number)
    sidecar.wait_until_restarted("kvleased", num_restarts + 1)
    sidecar.node.until(lambda: sidecar.order("who")["epoch"] > before["epoch"] or None)
    found = sidecar.order("serve", prompt=3, num_tokens=_TOKENS)

    assert found["host_hit_tokens"] >= _FOUND_MIN
    assert found["wrong_blocks"] == 0
    assert sidecar.container("engine")["restartCount"] == num_of_engine


def test_deleted_pod_drains_and_its_successor_serves(sidecar: Sidecar) -> None:
    """A pod that is deleted drains before it ends, and the one that takes its place begins with empty pools."""
    sidecar.order("serve", prompt=4, num_tokens=_TOKENS)
    old = sidecar.pod()["metadata"]["name"]

    with sidecar.node.follow(old, NAMESPACE, "kvleased") as log:
        sidecar.node.kubectl("delete", "pod", old, f"--namespace={NAMESPACE}", "--wait=false")
        said = log.communicate()[0]
    sidecar.wait_until_ready()
    first = sidecar.order("serve", prompt=4, num_tokens=_TOKENS)
    second = sidecar.order("serve", prompt=4, num_tokens=_TOKENS)

    events = [json.loads(line)["event"] for line in said.splitlines() if line.startswith("{")]
    assert events.index("draining") < events.index("drained")
    assert sidecar.pod()["metadata"]["name"] != old
    assert first["device_hit_tokens"] == first["host_hit_tokens"] == 0
    assert second["device_hit_tokens"] >= _FOUND_MIN
    assert second["wrong_blocks"] == 0
