"""An unusable GPU is refused before anything starts; a driver that fails later costs a mover, but no bytes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlease import CacheOptions, Client
from kvlease.errors import InvalidError
from tests.acceptance.serving import Serving, pool_of, served
from tests.gpu.test_daemon import (
    INPUTS,
    NUM_BLOCKS,
    NUM_TOKENS,
    TOKENS_PER_BLOCK,
    child_of,
    filled,
    hits,
)


@pytest.fixture(autouse=True)
def is_told_to_fail(device: str, request: pytest.FixtureRequest) -> None:
    """Skip the test on a real GPU, because only the stand-in can be told to fail."""
    assert device
    if request.node.callspec.params["device"] != "stand-in":
        pytest.skip("a GPU cannot be told to fail")


def _refusal(tmp_path: Path, **variables: str) -> str:
    """Return why `kvleased serve` refuses the device."""
    command = [sys.executable, "-m", "kvleased", "serve", "--runtime-dir", str(tmp_path / "run")]
    refused = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == os.EX_CONFIG
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    return refused.stderr


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        pytest.param({"KVLEASE_STANDIN_DEVICES": "0"}, "finds no working GPU", id="none"),
        pytest.param({"KVLEASED_DEVICE": "cuda:7"}, "this process sees is 1", id="another number"),
        pytest.param({"KVLEASE_STANDIN_NO_VMM": "1"}, "cannot be shared", id="no shared memory"),
        pytest.param({"KVLEASE_STANDIN_COMPUTE_MODE": "3"}, "-c DEFAULT", id="exclusive"),
        pytest.param({"LD_LIBRARY_PATH": ""}, "", id="whatever is there without the stand-in"),
    ],
)
def test_gpu_that_cannot_be_used_is_refused_at_once(
    tmp_path: Path, variables: dict[str, str], reason: str
) -> None:
    """An unusable GPU is refused with one line that says what to do, and nothing is made."""
    refusal = _refusal(tmp_path, **variables)

    assert refusal.startswith("kvleased: --device cuda:")
    assert reason in refusal
    assert "leave out --device" in refusal


def test_driver_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """A start gives up on a driver that hangs."""
    from kvleased.memory.looking import look_at  # noqa: PLC0415 - the same
    from kvleased.system.directories import UnusableError  # noqa: PLC0415 - one of the service's

    assert tmp_path
    with pytest.raises(UnusableError, match="has not answered"):
        look_at("cuda:0", seconds_max=0.001)


THOROUGH = pytest.mark.thorough


@pytest.fixture(
    params=[
        pytest.param({}, id="all is well"),
        pytest.param({"KVLEASE_STANDIN_NO_BATCH": "1"}, id="no batched copies", marks=THOROUGH),
        pytest.param(
            {"KVLEASE_STANDIN_FAIL": "cuMemHostRegister_v2"},
            id="nothing can be pinned",
            marks=THOROUGH,
        ),
        pytest.param({"KVLEASE_STANDIN_MICROSECONDS": "2000"}, id="slow copies", marks=THOROUGH),
    ]
)
def serving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serving]:
    """Run a daemon over a driver that has a fault and counts copies in a file."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in request.param.items():
            patch.setenv(name, value)
        patch.setenv("KVLEASE_STANDIN_COUNTS", str(tmp_path / "counts"))
        (tmp_path / "run").mkdir(mode=0o700)
        with served(tmp_path / "run") as serving:
            yield serving


def test_copies_are_right_however_they_are_made(
    serving: Serving, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Blocks come back from the host with their bytes, batched or one by one, from pinned memory or not."""
    with Client(serving.address("unix"), on_doubt="raise") as client:
        client.register("main", INPUTS, CacheOptions(write_policy="write-through"))
        serving.until(lambda: client.get_cache("main").status == "ready")
        with client.attach("main") as worker:
            keys = filled(worker)
            for name in ("all", "once more"):
                with worker.reserve(
                    name, num_tokens=(NUM_BLOCKS - 1) * TOKENS_PER_BLOCK, wait_ms=20_000
                ):
                    pass

            on_device, on_host = hits(worker, keys)
    assert on_device + on_host == NUM_TOKENS
    assert on_host > on_device
    calls = {line.split()[0] for line in (tmp_path / "counts").read_text().splitlines()}
    is_batched = "batched" not in request.node.name and "pinned" not in request.node.name
    assert ("batch" in calls) is is_batched


def test_failed_copy_costs_the_mover_and_no_bytes(tmp_path: Path) -> None:
    """When the driver fails, the mover ends and another starts; lost copies are recomputed, and never wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLEASE_STANDIN_FAIL", "cuMemcpyBatchAsync")
        (tmp_path / "run").mkdir(mode=0o700)
        with (
            served(tmp_path / "run") as serving,
            Client(serving.address("unix"), on_doubt="raise") as client,
        ):
            client.register("main", INPUTS, CacheOptions(write_policy="write-through"))
            serving.until(lambda: client.get_cache("main").status == "ready")
            with client.attach("main") as worker:
                keys = filled(worker)
                log = tmp_path / "log"
                serving.until(lambda: log.read_text().count('"mover_ended"') > 0)

                assert hits(worker, keys) == (NUM_TOKENS, 0)
                assert "cuMemcpyBatchAsync failed" in log.read_text()


def test_worker_that_does_not_see_the_gpu_is_told_which_it_is(tmp_path: Path) -> None:
    """A worker that does not see the daemon's GPU is told its UUID; the two may number it differently."""
    (tmp_path / "run").mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLEASE_STANDIN_DEVICES", "2")
        patch.setenv("KVLEASED_DEVICE", "cuda:1")
        with (
            served(tmp_path / "run") as serving,
            Client(serving.address("unix"), on_doubt="raise") as client,
        ):
            client.register("main", INPUTS)
            serving.until(lambda: client.get_cache("main").status == "ready")
            with client.attach("main") as worker:
                assert worker.gpu is not None
                assert worker.gpu.device.ordinal == 1

            # From now on this process sees only the first GPU.
            patch.setenv("KVLEASE_STANDIN_DEVICES", "1")
            with pytest.raises(InvalidError, match="CUDA_VISIBLE_DEVICES") as refused:
                client.attach("main")
            assert client.stats("main").caches[0].num_workers == 0

    assert refused.value.rule == "unknown_device"
    assert "41414141-4141" in refused.value.message


def test_mover_that_is_killed_in_mid_copy_costs_no_bytes(tmp_path: Path) -> None:
    """Blocks whose copy was cut off are not hits, and all hits have the committed bytes."""
    (tmp_path / "run").mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        # Copying half a pool now takes more than half a second.
        patch.setenv("KVLEASE_STANDIN_MICROSECONDS", "20000")
        with (
            served(tmp_path / "run") as serving,
            Client(serving.address("unix"), on_doubt="raise") as client,
        ):
            client.register("main", INPUTS, CacheOptions(write_policy="write-through"))
            serving.until(lambda: client.get_cache("main").status == "ready")
            with client.attach("main") as worker:
                keys = filled(worker)
                os.kill(child_of(serving, "mover"), signal.SIGKILL)
                serving.until(lambda: (tmp_path / "log").read_text().count("mover_attached") > 1)
                with worker.reserve("all", num_tokens=NUM_TOKENS, wait_ms=20_000) as lease:
                    pool_of(worker)[lease.block_ids] = 0xEE

                # `hits` compares the bytes of all hits.
                assert sum(hits(worker, keys)) <= NUM_TOKENS
