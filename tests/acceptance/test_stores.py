"""The lower tiers with real processes and files: what was acknowledged is found again, what is damaged never serves."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from kvlease import PlanInputs
from kvleased.movers.cells import BYTES_PER_SECTOR
from tests.acceptance.serving import Serving, served
from tests.acceptance.tiering import (
    TOKENS_PER_BLOCK,
    attached,
    child,
    child_or_none,
    compute,
    counter,
    inputs_of,
    kill_all,
    prompt,
    ready,
    reason,
    status,
)

pytestmark = pytest.mark.acceptance

BLOCKS_PER_PROMPT = 4
TOKENS_PER_PROMPT = BLOCKS_PER_PROMPT * TOKENS_PER_BLOCK
NUM_PROMPTS = 8
NUM_BLOCKS = NUM_PROMPTS * BLOCKS_PER_PROMPT
FIRST_PAYLOAD_BYTES = 4 * BYTES_PER_SECTOR
"""No more than what the cells of all slots take."""


@pytest.fixture
def disk_dir(tmp_path: Path) -> Path:
    """A private directory for stores."""
    directory = tmp_path / "disk"
    directory.mkdir(mode=0o700)
    return directory


def small() -> PlanInputs:
    """Return a cache whose device and host pools have room for two prompts each, and whose store has room for all."""
    return inputs_of(
        device_blocks=2 * BLOCKS_PER_PROMPT,
        host_slots=2 * BLOCKS_PER_PROMPT,
        disk_slots=2 * NUM_BLOCKS,
    )


def fill(serving: Serving, plan: PlanInputs) -> None:
    """Compute all prompts one after the other, and wait until the disk store has them."""
    with attached(serving, plan) as (client, worker):
        serving.until(lambda: status(client, "disk") == "ready")
        for number in range(NUM_PROMPTS):
            compute(worker, prompt(number, BLOCKS_PER_PROMPT)).release()
            serving.until(lambda done=number + 1: ready(client, "disk") == done * BLOCKS_PER_PROMPT)


def flip_payloads(directory: Path) -> None:
    """Flip a bit of every block of every store; what describes the store and its slots lies before them."""
    for path in directory.iterdir():
        if path.stat().st_size < FIRST_PAYLOAD_BYTES:
            continue
        with path.open("r+b") as store:
            for at in range(FIRST_PAYLOAD_BYTES, path.stat().st_size, BYTES_PER_SECTOR):
                store.seek(at + 2048)
                byte = store.read(1)
                store.seek(at + 2048)
                store.write(bytes([byte[0] ^ 1]))


def test_blocks_come_back_from_disk_when_no_other_tier_has_them(
    tmp_path: Path, disk_dir: Path
) -> None:
    """Prompts that left device and host pool are read from the store, and every byte is what was committed."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        with attached(serving, small()) as (_, worker):
            lease = compute(worker, prompt(0, BLOCKS_PER_PROMPT))
            assert lease.disk_hit_tokens == TOKENS_PER_PROMPT
            assert lease.hit_tokens == TOKENS_PER_PROMPT
            lease.release()


def test_a_store_outlives_the_whole_daemon(tmp_path: Path, disk_dir: Path) -> None:
    """Supervisor, control process and movers are killed at once; the next daemon finds every block by its header."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        kill_all(serving)
        serving.start()
        serving.wait_until_ready()
        with attached(serving, small()) as (client, worker):
            serving.until(lambda: status(client, "disk") == "ready")
            assert ready(client, "disk") == NUM_BLOCKS
            for number in range(NUM_PROMPTS):
                lease = compute(worker, prompt(number, BLOCKS_PER_PROMPT))
                assert lease.hit_tokens == TOKENS_PER_PROMPT
                lease.release()


def test_the_control_process_may_die_beside_its_stores(tmp_path: Path, disk_dir: Path) -> None:
    """After SIGKILL of the control process the blocks of all tiers are findable as before."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        with attached(serving, small()) as (client, worker):
            serving.restart_control(worker)
            serving.until(lambda: status(client, "disk") == "ready")
            assert ready(client, "disk") == NUM_BLOCKS
            lease = compute(worker, prompt(1, BLOCKS_PER_PROMPT))
            assert lease.hit_tokens == TOKENS_PER_PROMPT
            lease.release()


def test_a_control_process_that_starts_beside_a_store_that_is_off(
    tmp_path: Path, disk_dir: Path
) -> None:
    """The next control process uses no store before its mover has said that it works, and then all of it."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        with attached(serving, small()) as (client, worker):
            (store,) = disk_dir.glob("*.store")
            store.chmod(0o644)
            serving.restart_control(worker)
            serving.until(lambda: "0644" in reason(client, "disk"))

            lease = compute(worker, prompt(0, BLOCKS_PER_PROMPT))
            assert not lease.disk_hit_tokens
            lease.release()
            assert not counter(client, "copies_failed")
            assert not counter(client, "disk_failures")

            store.chmod(0o600)
            serving.until(lambda: status(client, "disk") == "ready")
            lease = compute(worker, prompt(1, BLOCKS_PER_PROMPT))
            assert lease.disk_hit_tokens == TOKENS_PER_PROMPT
            lease.release()


def test_a_new_store_in_the_place_of_the_old_one_is_filled_anew(
    tmp_path: Path, disk_dir: Path
) -> None:
    """When the directory was removed, slots of the old file cost no failure each, and none is lost for good."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        with attached(serving, small()) as (client, worker):
            shutil.rmtree(disk_dir)
            # The first to ask meets a file that is gone; the next one comes by itself.
            compute(worker, prompt(0, BLOCKS_PER_PROMPT)).release()
            serving.until(lambda: counter(client, "disk_slots_forgotten") >= NUM_BLOCKS)
            serving.until(lambda: status(client, "disk") == "ready")

            # The host pool has the last prompt and the first one; the others are computed again.
            serving.until(lambda: ready(client, "disk") == 2 * BLOCKS_PER_PROMPT)
            for number in range(1, NUM_PROMPTS - 1):
                compute(worker, prompt(number, BLOCKS_PER_PROMPT)).release()
                wanted = (number + 2) * BLOCKS_PER_PROMPT
                serving.until(lambda wanted=wanted: ready(client, "disk") == wanted)
            lease = compute(worker, prompt(0, BLOCKS_PER_PROMPT))
            assert lease.disk_hit_tokens == TOKENS_PER_PROMPT
            lease.release()
            assert not counter(client, "disk_failures")


def test_flipped_bits_on_disk_are_misses(tmp_path: Path, disk_dir: Path) -> None:
    """Bytes that changed below the daemon's feet are recomputed, counted, and never served."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        flip_payloads(disk_dir)
        with attached(serving, small()) as (client, worker):
            lease = compute(worker, prompt(0, BLOCKS_PER_PROMPT))
            assert lease.hit_tokens < TOKENS_PER_PROMPT
            assert counter(client, "disk_failures") > 0
            lease.release()


def test_a_mover_that_hangs_or_dies_costs_hits_and_nothing_else(
    tmp_path: Path, disk_dir: Path
) -> None:
    """With the disk's mover stopped, then killed, calls are answered in time; its successor serves the store again."""
    options = ("--disk-dir", str(disk_dir), "--mover-seconds-max", "1")
    with served(tmp_path / "run", *options) as serving:
        fill(serving, small())
        with attached(serving, small()) as (client, worker):
            stopped = child(serving, "disk-mover")
            os.kill(stopped, signal.SIGSTOP)
            lease = compute(worker, prompt(0, BLOCKS_PER_PROMPT))
            lease.release()
            serving.until(lambda: child_or_none(serving, "disk-mover") not in {None, stopped})
            serving.until(lambda: status(client, "disk") == "ready")
            os.kill(child(serving, "disk-mover"), signal.SIGKILL)
            lease = compute(worker, prompt(1, BLOCKS_PER_PROMPT))
            lease.release()
            serving.until(lambda: status(client, "disk") == "ready")
            lease = compute(worker, prompt(2, BLOCKS_PER_PROMPT))
            assert lease.hit_tokens == TOKENS_PER_PROMPT
            lease.release()


def test_a_store_that_vanishes_is_a_tier_that_is_off(tmp_path: Path, disk_dir: Path) -> None:
    """Without its files the tier says so and why, and everything goes on without it."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        for path in disk_dir.iterdir():
            path.unlink()
        disk_dir.chmod(0o500)
        try:
            with attached(serving, small()) as (client, worker):
                os.kill(child(serving, "disk-mover"), signal.SIGKILL)
                serving.until(lambda: status(client, "disk") == "off")
                assert reason(client, "disk")
                lease = compute(worker, prompt(0, BLOCKS_PER_PROMPT))
                assert not lease.disk_hit_tokens
                lease.release()
        finally:
            disk_dir.chmod(0o700)
