"""Laws of the shipped pods, run for real: two locked containers share memory, and each survives the other's end.

Neither container sees the other's processes, so no process id has a meaning between them: the daemon learns of a
worker's end from the process descriptor that the worker passed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.containers.engine import Engine, namespace_of, status_of
from tests.deploy.containers.pods import Pod, device_of, reusable, runnable
from tests.deploy.tools import ROOT, Helm

pytestmark = pytest.mark.deploy

_SETTINGS: Final = {
    "KVLEASED_MEMORY_BYTES_MAX": str(64 << 20),
    "KVLEASED_DEVICE_BYTES_DEFAULT": str(32 << 20),
    # No lease runs out while these tests run: blocks become free only by the proof of an end.
    "KVLEASED_LEASE_SECONDS": "3600",
    "KVLEASED_HEARTBEAT_SECONDS": "5",
}
_TOKENS: Final = 160


@pytest.fixture(scope="module", params=["sidecar.yaml", "chart"])
def pod(
    request: pytest.FixtureRequest,
    engine: Engine,
    helm: Helm,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pod]:
    """Run each shipped pod."""
    if request.param == "chart":
        template = helm.render({}).one("Deployment")["spec"]["template"]
        document = {"apiVersion": "v1", "kind": "Pod", **template}
        document["metadata"]["name"] = "chart"
    else:
        (document,) = helm.load_yaml((ROOT / "deploy" / "sidecar.yaml").read_text())
    folder = tmp_path_factory.mktemp("pod")
    with Pod.running(engine, runnable(document, _SETTINGS), folder) as running:
        yield running


def test_containers_are_locked(pod: Pod) -> None:
    """Each container is user 10001 without capabilities, with a read-only root, its own processes and no network."""
    pids = [pod.engine.pid(container) for container in (pod.daemon, pod.worker)]

    for pid in pids:
        status = status_of(pid)
        assert status["Uid"].split() == status["Gid"].split() == ["10001"] * 4
        assert {status[name] for name in status if name.startswith("Cap")} == {"0" * 16}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        (root,) = [fields[5] for fields in map(str.split, mounts) if fields[4] == "/"]
        assert "ro" in root.split(",")
        devices = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
        assert [line.split(":")[0].strip() for line in devices] == ["lo"]
    for kind in ("pid", "mnt"):
        assert len({namespace_of(pid, kind) for pid in pids}) == len(pids)


def test_worker_sees_only_itself_and_the_memory(pod: Pod) -> None:
    """A worker reports that it sees only itself, may write nothing, and has the pool in its address space."""
    told = pod.order("who")

    assert (told["pid"], told["others"], told["uid"]) == (1, [1], 10001)
    assert told["refusal"] == "Read-only file system"
    assert told["death_proof"] == "pidfd"
    assert told["bytes_mapped"] > 0


def test_what_a_worker_writes_the_daemon_has(pod: Pod) -> None:
    """The daemon's mover copies what the worker wrote, and the same bytes come back in other blocks."""
    first = pod.order("serve", prompt=1, num_tokens=_TOKENS)
    second = pod.order("serve", prompt=1, num_tokens=_TOKENS)
    evicted = pod.order("evict")
    third = pod.order("serve", prompt=1, num_tokens=_TOKENS)

    assert first["are_granted"]
    assert first["device_hit_tokens"] == 0
    # The last token's block is always computed, to have its logits.
    assert second["device_hit_tokens"] >= _TOKENS - 16
    assert evicted["num_evicted"] > 0
    assert third["host_hit_tokens"] >= _TOKENS - 16
    assert (second["wrong_blocks"], third["wrong_blocks"]) == (0, 0)


def test_killed_worker_gives_its_blocks_back(pod: Pod) -> None:
    """SIGKILL frees a worker's blocks although no lease has run out; restarted, it finds what it committed."""
    pod.order("serve", prompt=2, num_tokens=_TOKENS)
    before = pod.stats()
    held = pod.order("hold", prompt=3, num_tokens=_TOKENS, num_committed=_TOKENS // 2)
    during = pod.stats()
    pod.kill(pod.worker)
    after = pod.engine.until(
        pod.daemon, lambda: None if (stats := pod.stats())["num_workers"] else stats
    )

    pod.restart(pod.worker)
    pod.wait_until_ready()
    whole = pod.order("serve", prompt=2, num_tokens=_TOKENS)
    half = pod.order("serve", prompt=3, num_tokens=_TOKENS)
    everything = pod.order("serve", prompt=4, num_tokens=64 * 16)

    assert reusable(before) - reusable(during) == held["num_blocks"]
    assert (reusable(after), after["num_leases"]) == (reusable(before), 0)
    assert device_of(after)["quarantined"] == 0
    assert whole["device_hit_tokens"] >= _TOKENS - 16
    assert half["device_hit_tokens"] == _TOKENS // 2
    assert (whole["wrong_blocks"], half["wrong_blocks"]) == (0, 0)
    assert everything["num_blocks"] == device_of(after)["num_blocks"]


def test_killed_control_process_is_not_noticed(pod: Pod) -> None:
    """After SIGKILL of the control process the worker attaches to the next, ends its request, and finds its blocks."""
    pod.order("serve", prompt=5, num_tokens=_TOKENS)
    held = pod.order("hold", prompt=6, num_tokens=_TOKENS, num_committed=_TOKENS // 2)

    pod.kill_control()
    finished = pod.order("finish")
    old = pod.order("serve", prompt=5, num_tokens=_TOKENS)
    new = pod.order("serve", prompt=6, num_tokens=_TOKENS)

    assert finished["is_live"]
    assert finished["epoch"] > held["epoch"]
    for told in (old, new):
        assert told["device_hit_tokens"] >= _TOKENS - 16
        assert told["wrong_blocks"] == 0


def test_killed_daemon_is_found_again(pod: Pod) -> None:
    """SIGKILL of the daemon ends its memory and leases, and the same worker goes on with the next daemon."""
    worker = pod.engine.pid(pod.worker)
    held = pod.order("hold", prompt=7, num_tokens=_TOKENS, num_committed=_TOKENS // 2)

    pod.kill(pod.daemon)
    pod.restart(pod.daemon)
    pod.wait_until_ready()
    finished = pod.order("finish")
    first = pod.order("serve", prompt=7, num_tokens=_TOKENS)
    second = pod.order("serve", prompt=7, num_tokens=_TOKENS)

    assert finished["is_live"] is False
    assert first["epoch"] > held["epoch"]
    assert first["device_hit_tokens"] == first["host_hit_tokens"] == 0
    assert second["device_hit_tokens"] >= _TOKENS - 16
    assert second["wrong_blocks"] == 0
    assert pod.engine.pid(pod.worker) == worker
