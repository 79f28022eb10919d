"""Stores with real processes and files: acknowledged blocks are found again, damaged ones are never served."""

import os
import shutil
import signal
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvlease import Client, PlanInputs
from kvlease.errors import KVLeaseError, WrongStateError
from kvlease.units import BYTES_PER_SECTOR
from tests.acceptance.serving import Serving, served
from tests.acceptance.tiering import (
    CACHE,
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
"""An offset behind the headers of the store and of its slots, where only payload follows."""


@pytest.fixture
def disk_dir(tmp_path: Path) -> Path:
    """Make a private directory for stores."""
    directory = tmp_path / "disk"
    directory.mkdir(mode=0o700)
    return directory


def small() -> PlanInputs:
    """Return a cache whose device and host pools hold two prompts each, and whose store holds all."""
    return inputs_of(
        device_blocks=2 * BLOCKS_PER_PROMPT,
        host_slots=2 * BLOCKS_PER_PROMPT,
        disk_slots=2 * NUM_BLOCKS,
    )


def fill(serving: Serving, plan: PlanInputs, cache: str = CACHE, first: int = 0) -> None:
    """Compute all prompts from number `first` on in turn, and wait until the disk store has them."""
    with attached(serving, plan, cache=cache) as (client, worker):
        serving.until(lambda: status(client, "disk", cache) == "ready")
        for count in range(1, NUM_PROMPTS + 1):
            compute(worker, prompt(first + count - 1, BLOCKS_PER_PROMPT)).release()
            wanted = count * BLOCKS_PER_PROMPT
            serving.until(lambda wanted=wanted: ready(client, "disk", cache) == wanted)  # type: ignore[misc]


def hits(serving: Serving, cache: str = CACHE, first: int = 0) -> list[int]:
    """Return how many tokens of each prompt from number `first` on are disk hits."""
    with attached(serving, small(), cache=cache) as (client, worker):
        serving.until(lambda: status(client, "disk", cache) == "ready")
        found = []
        for number in range(first, first + NUM_PROMPTS):
            with compute(worker, prompt(number, BLOCKS_PER_PROMPT)) as lease:
                found.append(lease.disk_hit_tokens)
        return found


def flip_payloads(directory: Path) -> None:
    """Flip a bit in every sector of every store's payload, behind the store's and slots' headers."""
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
    """Prompts that left device and host pools are read from the store, and every byte is what was committed."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        with attached(serving, small()) as (_, worker):
            lease = compute(worker, prompt(0, BLOCKS_PER_PROMPT))
            assert lease.disk_hit_tokens == TOKENS_PER_PROMPT
            assert lease.hit_tokens == TOKENS_PER_PROMPT
            lease.release()


@pytest.mark.parametrize(
    "is_host_pool_kept",
    [
        pytest.param(False, id="alone"),
        pytest.param(True, id="with its host pool", marks=pytest.mark.thorough),
    ],
)
def test_a_store_outlives_the_whole_daemon(
    tmp_path: Path, disk_dir: Path, is_host_pool_kept: bool
) -> None:
    """Supervisor, control process and movers are killed at once; the next daemon finds every block by its header."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as host_dir,
        served(
            tmp_path / "run",
            "--disk-dir",
            str(disk_dir),
            *(["--host-dir", host_dir] if is_host_pool_kept else []),
        ) as serving,
    ):
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


@pytest.mark.thorough
@pytest.mark.thorough
def test_a_control_process_that_starts_beside_a_store_that_is_off(
    tmp_path: Path, disk_dir: Path
) -> None:
    """A new control process uses a store only once its mover says that it works, and then all of it."""
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


def test_what_is_left_of_a_store_is_found_again(tmp_path: Path, disk_dir: Path) -> None:
    """A store whose file is cut off in use has all that was not cut off again, and no slot is retired for the rest."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        (store,) = disk_dir.glob("*.store")
        with attached(serving, small()) as (client, worker):
            os.truncate(store, store.stat().st_size - NUM_BLOCKS * BYTES_PER_SECTOR)
            serving.until(lambda: counter(client, "disk_slots_forgotten") == NUM_BLOCKS)
            serving.until(lambda: status(client, "disk") == "ready")
            assert counter(client, "slots_adopted") == NUM_BLOCKS
            lease = compute(worker, prompt(0, BLOCKS_PER_PROMPT))
            assert lease.disk_hit_tokens == TOKENS_PER_PROMPT
            lease.release()
            assert not counter(client, "disk_failures")


def test_a_new_store_in_the_place_of_the_old_one_is_filled_anew(
    tmp_path: Path, disk_dir: Path
) -> None:
    """After the directory is removed, the old file's slots are forgotten without failures and filled anew."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        with attached(serving, small()) as (client, worker):
            shutil.rmtree(disk_dir)
            # The first request finds the file missing; the store comes back by itself.
            compute(worker, prompt(0, BLOCKS_PER_PROMPT)).release()
            disk_dir.mkdir(mode=0o700)
            serving.until(lambda: counter(client, "disk_slots_forgotten") >= NUM_BLOCKS)
            serving.until(lambda: status(client, "disk") == "ready")

            # The host pool has the first prompt and the last but one; only the device has the last.
            serving.until(lambda: ready(client, "disk") == 2 * BLOCKS_PER_PROMPT)
            for number in range(1, NUM_PROMPTS - 1):
                compute(worker, prompt(number, BLOCKS_PER_PROMPT)).release()
                # The last prompt is written back as soon as it leaves; all others are computed again.
                wanted = min(number + 3, NUM_PROMPTS) * BLOCKS_PER_PROMPT
                serving.until(lambda wanted=wanted: ready(client, "disk") == wanted)
            lease = compute(worker, prompt(0, BLOCKS_PER_PROMPT))
            assert lease.disk_hit_tokens == TOKENS_PER_PROMPT
            lease.release()
            assert not counter(client, "disk_failures")


def test_flipped_bits_on_disk_are_misses(tmp_path: Path, disk_dir: Path) -> None:
    """Bytes that changed on disk are counted and recomputed, and never served."""
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
    """While the disk's mover is stopped, then killed, calls end in time; its successor serves the store again."""
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


def test_a_disk_that_hangs_is_a_miss_in_time(tmp_path: Path, disk_dir: Path) -> None:
    """Requests whose bytes do not come in time are granted without them, and later hit them."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        with attached(serving, small()) as (client, worker):
            mover = child(serving, "disk-mover")
            os.kill(mover, signal.SIGSTOP)
            try:
                tokens = prompt(0, BLOCKS_PER_PROMPT)
                keys = worker.keys.chain(tokens, TOKENS_PER_BLOCK)
                with worker.reserve("late", keys=keys, num_tokens=len(tokens), wait_ms=1) as lease:
                    assert (lease.hit_tokens, len(lease.block_ids)) == (0, BLOCKS_PER_PROMPT)
            finally:
                os.kill(mover, signal.SIGCONT)

            serving.until(lambda: counter(client, "disk_loads") == BLOCKS_PER_PROMPT)
            with compute(worker, prompt(0, BLOCKS_PER_PROMPT)) as lease:
                assert lease.device_hit_tokens == TOKENS_PER_PROMPT


@pytest.mark.thorough
def test_a_disk_that_hangs_takes_no_blocks_from_others(tmp_path: Path, disk_dir: Path) -> None:
    """A hanging disk's tier is off long before its mover is replaced, and blocks of unbegun loads are free again."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
    options = ("--disk-dir", str(disk_dir), "--mover-seconds-max", "20")
    with (
        served(tmp_path / "run", *options) as serving,
        attached(serving, small()) as (
            client,
            worker,
        ),
    ):
        serving.until(lambda: ready(client, "disk") == NUM_BLOCKS)
        mover = child(serving, "disk-mover")
        os.kill(mover, signal.SIGSTOP)
        try:
            for number in range(NUM_PROMPTS):
                tokens = prompt(number, 2)
                keys = worker.keys.chain(tokens, TOKENS_PER_BLOCK)
                with suppress(KVLeaseError):
                    worker.reserve(f"late-{number}", keys=keys, num_tokens=32, wait_ms=1).release()
            serving.until(lambda: "the disk is hanging" in reason(client, "disk"))
            with compute(worker, prompt(NUM_PROMPTS, BLOCKS_PER_PROMPT)) as lease:
                assert not lease.hit_tokens
            assert child(serving, "disk-mover") == mover
        finally:
            os.kill(mover, signal.SIGCONT)

        serving.until(lambda: status(client, "disk") == "ready")
        with compute(worker, prompt(NUM_PROMPTS - 1, BLOCKS_PER_PROMPT)) as lease:
            assert lease.hit_tokens == TOKENS_PER_PROMPT


def test_a_store_that_vanishes_is_a_tier_that_is_off(tmp_path: Path, disk_dir: Path) -> None:
    """A tier whose files vanish is off and says why, and everything goes on without it."""
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


@pytest.mark.thorough
def test_a_directory_that_was_moved_is_not_replaced(tmp_path: Path, disk_dir: Path) -> None:
    """No mover makes a store elsewhere, and all is found again when the directory is back."""
    away = disk_dir.with_name("away")
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        with attached(serving, small()) as (client, worker):
            disk_dir.rename(away)
            disk_dir.mkdir(mode=0o700)
            serving.until(lambda: "not the same directory" in reason(client, "disk"))
            os.kill(child(serving, "disk-mover"), signal.SIGKILL)
            log = Path(serving.log.name)
            serving.until(lambda: log.read_text().count("disk_store_off") == 2)
            off = [line for line in log.read_text().splitlines() if "disk_store_off" in line]
            assert "not the same directory" in off[-1]
            assert not list(disk_dir.iterdir())

            disk_dir.rmdir()
            away.rename(disk_dir)
            serving.until(lambda: status(client, "disk") == "ready")
            lease = compute(worker, prompt(0, BLOCKS_PER_PROMPT))
            assert lease.disk_hit_tokens == TOKENS_PER_PROMPT
            lease.release()


@pytest.mark.thorough
def test_a_cache_is_registered_while_the_directory_is_away(tmp_path: Path, disk_dir: Path) -> None:
    """Stores may take what the file system of the daemon's start has room for; a cache without its store has a pool."""
    away = tmp_path / "away"
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        disk_dir.rename(away)
        for name in ("missing", "replaced"):
            with attached(serving, small(), cache=name) as (client, worker):
                compute(worker, prompt(0, BLOCKS_PER_PROMPT)).release()
                assert status(client, "disk", name) == "off"
                serving.restart_control(worker)
            disk_dir.mkdir(exist_ok=True)
        shutil.rmtree(disk_dir)
        away.rename(disk_dir)
        with attached(serving, small(), cache="replaced") as (client, _):
            serving.until(lambda: status(client, "disk", "replaced") == "ready")


def test_a_store_of_another_geometry_is_another_store(tmp_path: Path, disk_dir: Path) -> None:
    """With other disk_bytes nothing of the old store is used; with the old ones all of it is found."""
    larger = replace(small(), disk_bytes=small().disk_bytes + 5 * 8192)
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        kill_all(serving)
        serving.start()
        serving.wait_until_ready()
        with Client(serving.address("unix")) as client:
            fill(serving, larger)
            serving.until(lambda: not client.stats(CACHE).caches[0].num_workers)
            client.delete_cache(CACHE)
            assert hits(serving) == [TOKENS_PER_PROMPT] * NUM_PROMPTS


def test_a_cache_that_is_purged_leaves_no_prompt(tmp_path: Path, disk_dir: Path) -> None:
    """A delete leaves the store for the next registration; a purge removes it, and is refused while it is off."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        with Client(serving.address("unix")) as client:
            serving.until(lambda: not client.stats(CACHE).caches[0].num_workers)
            assert client.delete_cache(CACHE).keeps_disk
            assert hits(serving) == [TOKENS_PER_PROMPT] * NUM_PROMPTS
            serving.until(lambda: not client.stats(CACHE).caches[0].num_workers)
            (store,) = disk_dir.glob("*.store")
            store.chmod(0o644)
            serving.until(lambda: status(client, "disk") == "off")
            with pytest.raises(WrongStateError, match=r"cannot be purged: .*chmod 0600"):
                client.delete_cache(CACHE, purge=True)
            store.chmod(0o600)
            serving.until(lambda: status(client, "disk") == "ready")

        with Client(serving.address("http+unix")) as client:
            assert not client.delete_cache(CACHE, purge=True).keeps_disk

        assert not list(disk_dir.glob("*.store*"))
        assert hits(serving) == [0] * NUM_PROMPTS


@pytest.mark.thorough
def test_a_store_that_was_removed_is_made_anew(tmp_path: Path, disk_dir: Path) -> None:
    """A new store in the old one's place wears no slot out: the old contents are forgotten, and it is filled again."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        for path in disk_dir.glob("*.store"):
            path.unlink()
        with attached(serving, small()) as (client, worker):
            os.kill(child(serving, "disk-mover"), signal.SIGKILL)
            serving.until(lambda: status(client, "disk") == "off")
            serving.until(lambda: status(client, "disk") == "ready")
            # The host pool's blocks are stored anew.
            serving.until(lambda: ready(client, "disk") == 2 * BLOCKS_PER_PROMPT)
            lease = compute(worker, prompt(0, BLOCKS_PER_PROMPT))
            assert lease.hit_tokens == 0
            lease.release()
            assert counter(client, "disk_failures") == 0


@pytest.mark.thorough
def test_a_directory_that_was_removed_has_its_secret_again(tmp_path: Path, disk_dir: Path) -> None:
    """Blocks in the new directory are found by the next daemon, because the secret, and so the keys, are the same."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small())
        shutil.rmtree(disk_dir)
        with attached(serving, small()) as (client, _):
            os.kill(child(serving, "disk-mover"), signal.SIGKILL)
            serving.until(lambda: "No such file" in reason(client, "disk"))
            disk_dir.mkdir(mode=0o700)
            serving.until(lambda: status(client, "disk") == "ready")
            serving.until(lambda: ready(client, "disk") == 2 * BLOCKS_PER_PROMPT)
        serving.until((disk_dir / "secret").exists)
        kill_all(serving)
        serving.start()
        serving.wait_until_ready()
        with attached(serving, small()) as (client, worker):
            serving.until(lambda: status(client, "disk") == "ready")
            lease = compute(worker, prompt(NUM_PROMPTS - 1, BLOCKS_PER_PROMPT))
            assert lease.disk_hit_tokens == TOKENS_PER_PROMPT
            lease.release()


@pytest.mark.thorough
def test_a_store_that_another_cache_had_is_not_taken_for_the_own_one(
    tmp_path: Path, disk_dir: Path
) -> None:
    """When a cache of the same layout is deleted, another goes on with its own file, and retires no slot."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small(), "one")
        with attached(serving, small(), cache=CACHE) as (client, worker):
            serving.until(lambda: status(client, "disk") == "ready")
            compute(worker, prompt(NUM_PROMPTS, BLOCKS_PER_PROMPT)).release()
            serving.until(lambda: ready(client, "disk") == BLOCKS_PER_PROMPT)
            serving.until(lambda: not client.stats("one").caches[0].num_workers)
            client.delete_cache("one")
            os.kill(child(serving, "disk-mover"), signal.SIGKILL)
            serving.until(lambda: status(client, "disk") == "off")
            serving.until(lambda: status(client, "disk") == "ready")
            serving.until(lambda: ready(client, "disk") == BLOCKS_PER_PROMPT)
            client.evict(cache=CACHE, num_blocks=2 * BLOCKS_PER_PROMPT)
            for number in (1, 2, NUM_PROMPTS):
                compute(worker, prompt(number, BLOCKS_PER_PROMPT)).release()
            assert counter(client, "disk_failures") == 0


@pytest.mark.thorough
def test_two_caches_have_a_store_each_in_one_directory(tmp_path: Path, disk_dir: Path) -> None:
    """Two equal caches have a store each; both outlive the daemon, whichever cache is registered first then."""
    with served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving:
        fill(serving, small(), "one")
        fill(serving, small(), "two", first=NUM_PROMPTS)
        assert len(list(disk_dir.glob("*.store"))) == 2
        kill_all(serving)
        serving.start()
        serving.wait_until_ready()
        # Either cache may take either store: their keys and layout are the same.
        found = {
            first: [hits(serving, cache, first) for cache in ("two", "one")]
            for first in (0, NUM_PROMPTS)
        }

    assert [max(both) for both in found.values()] == [[TOKENS_PER_PROMPT] * NUM_PROMPTS] * 2
