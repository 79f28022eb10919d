"""A disk mover serves the bytes that were stored under a label, or says that it does not."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from kvleased.core.effects import Direction
from kvleased.movers.disk.cells import BYTES_PER_CELL
from kvleased.movers.disk.engine import DiskEngine
from kvleased.movers.disk.store_place import StorePlace
from kvleased.movers.protocol import Completion
from tests.laws.disks import Driver, Pools, labels_of, payload_of
from tests.unit.service.movers.remote.remote_node import wait_until

POOLS = [
    pytest.param(Pools(), id="whole sectors"),
    pytest.param(Pools(bytes_per_slot=5000), id="slots that end within a sector"),
    pytest.param(Pools(num_pieces=4, padding_bytes=192), id="pieces and padding"),
    pytest.param(Pools(bytes_per_slot=2 << 20), id="slots above what is read at once"),
]
every_pools = pytest.mark.parametrize("pools", POOLS)
SLOTS = [3, 0, 1, 2, 9, 15]
HOSTS = [5, 4, 3, 15, 0, 1]
BLOCKS = [0, 15, 7, 8, 2, 1]


@contextmanager
def _served(
    directory: Path | None,
    pools: Pools,
    bytes_max: int = 0,
    file_id: str = "",
    seconds_between_looks: float = 60.0,
) -> Iterator[Driver]:
    """Run a mover in a thread; yield the daemon's end, with the pools mapped."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place = None if directory is None else StorePlace(directory, bytes_max)
    engine = DiskEngine(theirs, place, 0.02, seconds_between_looks)
    thread = Thread(target=engine.run)
    with ExitStack() as stack:
        stack.callback(theirs.close)
        if place is not None:
            stack.callback(place.leave)
        stack.callback(thread.join)
        thread.start()
        driver = stack.enter_context(Driver(ours, pools))
        stack.callback(ours.shutdown, socket.SHUT_RDWR)
        driver.map(file_id)
        yield driver


def _fill(driver: Driver, contents: list[int], hosts: list[int]) -> list[int]:
    return [driver.fill(host, content) for host, content in zip(hosts, contents, strict=True)]


def _stored(driver: Driver, contents: list[int] = SLOTS, slots: list[int] = SLOTS) -> list[int]:
    """Store contents that are numbered like their slots; return their checksums."""
    sums = _fill(driver, contents, HOSTS)
    done = driver.store(slots, labels_of(contents), HOSTS, sums)
    assert (done.is_done, done.failed) == (True, ())
    return sums


def _served_blocks(driver: Driver, done: Completion) -> dict[int, bytes]:
    """Return the bytes of those of BLOCKS that a load has found."""
    assert done.is_done
    return {
        position: driver.block(block)
        for position, block in enumerate(BLOCKS)
        if position not in done.failed
    }


def _contents(driver: Driver, contents: list[int] = SLOTS) -> dict[int, bytes]:
    num_bytes = driver.pools.bytes_per_block
    return {position: payload_of(content, num_bytes) for position, content in enumerate(contents)}


def _file(directory: Path) -> Path:
    (path,) = directory.glob("*.store")
    return path


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ (1 << offset % 8)]))


@every_pools
def test_what_was_stored_is_loaded(tmp_path: Path, pools: Pools) -> None:
    """Scattered blocks come back byte for byte into other blocks, with their checksums."""
    with _served(tmp_path / "disk", pools) as driver:
        sums = _stored(driver)

        done = driver.load(SLOTS, labels_of(SLOTS), BLOCKS, sums)

        assert _served_blocks(driver, done) == _contents(driver)


@every_pools
def test_next_life_finds_exactly_what_was_acknowledged(tmp_path: Path, pools: Pools) -> None:
    """A mover that is started anew tells labels and checksums of all that is stored, and loads it."""
    with _served(tmp_path / "disk", pools) as driver:
        sums = _stored(driver)
        # What was stored in this life is not told.
        assert driver.look() == {}

    with _served(tmp_path / "disk", pools) as driver:
        found = driver.look()
        done = driver.load(SLOTS, labels_of(SLOTS), BLOCKS)

        labels = [label.tobytes() for label in labels_of(SLOTS)]
        assert found == dict(zip(SLOTS, zip(labels, sums, strict=True), strict=True))
        assert _served_blocks(driver, done) == _contents(driver)


def test_store_of_many_slots_is_looked_through_in_parts(tmp_path: Path) -> None:
    """No slot is left out at the borders of packets."""
    pools = Pools(num_disk_slots=2500, bytes_per_slot=64)
    slots = [0, 1023, 1024, 2047, 2048, 2499]
    with _served(tmp_path / "disk", pools) as driver:
        _stored(driver, slots=slots)

    with _served(tmp_path / "disk", pools) as driver:
        assert sorted(driver.look()) == slots


def test_overwritten_slot_holds_only_the_new(tmp_path: Path) -> None:
    """A slot that is written again loses its earlier label."""
    with _served(tmp_path / "disk", Pools()) as driver:
        _stored(driver)
        _stored(driver, contents=[20, 21, 22, 23, 24, 25])

        old = driver.load(SLOTS, labels_of(SLOTS), BLOCKS)
        new = driver.load(SLOTS, labels_of([20, 21, 22, 23, 24, 25]), BLOCKS)

        assert _served_blocks(driver, old) == {}
        assert _served_blocks(driver, new) == _contents(driver, [20, 21, 22, 23, 24, 25])


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("key", np.void(b"x" * 32)), ("tenant", 99), ("generation", 2), ("position", 99)],
)
def test_other_label_is_a_miss(tmp_path: Path, field: str, wrong: object) -> None:
    """A load under a label other than the slot's gets no bytes."""
    with _served(tmp_path / "disk", Pools()) as driver:
        _stored(driver)
        labels = labels_of(SLOTS)
        labels[field][2] = wrong

        done = driver.load(SLOTS, labels, BLOCKS)

        assert done.failed == (2,)
        assert driver.block(BLOCKS[2]) == bytes(driver.pools.bytes_per_block)


def test_source_that_changed_is_not_stored(tmp_path: Path) -> None:
    """A host slot whose bytes do not match their checksum is not stored; the others are."""
    with _served(tmp_path / "disk", Pools()) as driver:
        sums = _fill(driver, SLOTS, HOSTS)
        driver.host[HOSTS[1], 100] ^= 1

        stored = driver.store(SLOTS, labels_of(SLOTS), HOSTS, sums)
        loaded = driver.load(SLOTS, labels_of(SLOTS), BLOCKS)

        assert (stored.is_done, stored.failed) == (True, (1,))
        assert loaded.failed == (1,)


def test_checksum_that_the_daemon_remembers_counts(tmp_path: Path) -> None:
    """A load with another checksum than the stored one is a miss; 0 means that the daemon remembers none."""
    with _served(tmp_path / "disk", Pools()) as driver:
        sums = _stored(driver)

        done = driver.load(SLOTS, labels_of(SLOTS), BLOCKS, [0, sums[1] ^ 1, *sums[2:]])

        assert done.failed == (1,)


@pytest.mark.parametrize("offset", range(BYTES_PER_CELL))
def test_changed_cell_is_a_miss(tmp_path: Path, offset: int) -> None:
    """If any byte of a slot's cell is changed, that slot is neither found nor loaded, and the others are."""
    pools = Pools()
    with _served(tmp_path / "disk", pools) as driver:
        _stored(driver)
        _flip(_file(tmp_path / "disk"), pools.shape.cell_offset_bytes(1) + offset)
        done = driver.load(SLOTS, labels_of(SLOTS), BLOCKS)
        assert done.failed == (SLOTS.index(1),)

    with _served(tmp_path / "disk", pools) as driver:
        assert sorted(driver.look()) == sorted(set(SLOTS) - {1})


@pytest.mark.parametrize("offset", range(0, 8192, 257))
def test_changed_payload_is_a_miss_once(tmp_path: Path, offset: int) -> None:
    """If any byte of a payload is changed, the slot is not loaded, and the next life does not find it."""
    pools = Pools()
    with _served(tmp_path / "disk", pools) as driver:
        _stored(driver)
        _flip(_file(tmp_path / "disk"), pools.shape.slot_offset_bytes(1) + offset)

        done = driver.load(SLOTS, labels_of(SLOTS), BLOCKS)

        assert done.failed == (SLOTS.index(1),)
        assert driver.block(BLOCKS[SLOTS.index(1)]) == bytes(pools.bytes_per_block)

    with _served(tmp_path / "disk", pools) as driver:
        assert sorted(driver.look()) == sorted(set(SLOTS) - {1})


def test_cell_torn_at_any_byte_is_no_cell(tmp_path: Path) -> None:
    """A cell that was written in part, over zeros or over another cell, is never believed."""
    pools = Pools()
    with _served(tmp_path / "disk", pools) as driver:
        _stored(driver)
        path = _file(tmp_path / "disk")
        start = pools.shape.cell_offset_bytes(1)
        whole = path.read_bytes()[start : start + BYTES_PER_CELL]
        _stored(driver, contents=[20, 21, 22, 23, 24, 25])
        other = path.read_bytes()[start : start + BYTES_PER_CELL]

        for background in (bytes(BYTES_PER_CELL), other):
            for length in range(BYTES_PER_CELL):
                torn = whole[:length] + background[length:]
                if torn in (whole, other):
                    continue
                with path.open("r+b") as file:
                    file.seek(start)
                    file.write(torn)
                for label in (labels_of([1]), labels_of([22])):
                    assert driver.load([1], label, [0]).failed == (0,)


def test_loads_overtake_stores(tmp_path: Path) -> None:
    """Of waiting batches, loads are carried out first; nothing overtakes the mapping of pools."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place = StorePlace(tmp_path / "disk", 0)
    with closing(theirs), Driver(ours, Pools()) as driver:
        driver.map()
        stores = [driver.send(Direction.STORE, [0], [0], labels_of([0])) for _ in range(3)]
        loads = [driver.send(Direction.LOAD, [0], [0], labels_of([0])) for _ in range(2)]
        thread = Thread(target=DiskEngine(theirs, place).run)
        thread.start()

        order = [driver.answer().number for _ in range(5)]

        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
    place.leave()
    assert order == [*loads, *stores]


@pytest.mark.parametrize(
    ("slots", "hosts", "num_labels"),
    [([16], [0], 1), ([-1], [0], 1), ([0], [16], 1), ([0, 0], [1, 2], 2), ([0], [0], 2)],
)
def test_batch_out_of_bounds_is_refused(
    tmp_path: Path, slots: list[int], hosts: list[int], num_labels: int
) -> None:
    """A batch that names blocks or slots out of bounds changes nothing, and the next batch is served."""
    with _served(tmp_path / "disk", Pools()) as driver:
        labels = labels_of(list(range(num_labels)))

        assert not driver.store(slots, labels, hosts).is_done
        assert not driver.load(slots, labels, hosts).is_done
        _stored(driver)


def test_batch_of_nothing_is_done(tmp_path: Path) -> None:
    """A batch without copies is done."""
    with _served(tmp_path / "disk", Pools()) as driver:
        assert driver.store([], labels_of([]), []).is_done
        assert driver.load([], labels_of([]), []).is_done


def test_unmapped_store_is_free_for_the_next(tmp_path: Path) -> None:
    """A store that was unmapped is mapped again with all that is in it."""
    with _served(tmp_path / "disk", Pools()) as driver:
        _stored(driver)
        driver.look()
        driver.unmap()
        driver.has_looked = False
        driver.map()

        assert sorted(driver.look()) == sorted(SLOTS)
        assert len(list((tmp_path / "disk").glob("*.store"))) == 1


def test_store_gives_way_once_it_is_unmapped(tmp_path: Path) -> None:
    """The store of a mapped cache stays, even while it is off; after an unmap its bytes are for the next cache."""
    pools = Pools()
    other = replace(pools.message(), pool=2, layout_fingerprint="ab" * 32)
    with _served(
        tmp_path / "disk", pools, pools.shape.file_bytes, seconds_between_looks=0
    ) as driver:
        driver.until_on()
        file = _file(tmp_path / "disk")
        file.chmod(0o640)
        driver.until_off()

        driver.map_other(other)
        while driver.statuses[-1].pool != other.pool:
            driver.hear()
        assert "disk_bytes_max" in driver.statuses[-1].reason
        driver.unmap()
        driver.until_on()

        assert not file.exists()


def test_unused_store_goes_where_the_limit_was_lowered(tmp_path: Path) -> None:
    """A store of an earlier life that is above the limit is removed soon after the start, without being in the way."""
    directory, pools = tmp_path / "disk", Pools()
    earlier = StorePlace(directory, 0)
    earlier.open(replace(pools.shape, layout=bytes(32)))
    earlier.leave()
    unused = _file(directory)
    with _served(directory, pools) as driver:
        driver.until_on()
        assert unused.exists()

    with _served(directory, pools, pools.shape.file_bytes, seconds_between_looks=0.02) as driver:
        driver.until_on()

        wait_until(lambda: not unused.exists())
        assert _file(directory) != unused


def test_purged_store_is_gone_and_begins_anew(tmp_path: Path) -> None:
    """After a purge the file is deleted; a cache that stays mapped gets a new, empty store."""
    with _served(tmp_path / "disk", Pools()) as driver:
        _stored(driver)
        driver.look()

        with _file(tmp_path / "disk").open("rb") as file:
            assert driver.purge() == ""
            assert os.fstat(file.fileno()).st_nlink == 0

        assert "purged" in driver.until_off()
        driver.until_on()
        assert len(driver.load(SLOTS, labels_of(SLOTS), BLOCKS).failed) == len(SLOTS)
        assert len({status.file_id for status in driver.statuses if status.is_on}) == 2


def test_purge_is_no_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A store that is off because it was purged, as somebody asked, is told in the log without a warning."""
    with _served(tmp_path / "disk", Pools()) as driver:
        _stored(driver)
        driver.purge()
        driver.until_off()

    told = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert "warning" not in [one["level"] for one in told]


def test_purged_store_that_is_unmapped_stays_away(tmp_path: Path) -> None:
    """If the cache is unmapped with the answer to its purge, no file of it comes back."""
    with _served(tmp_path / "disk", Pools()) as driver:
        _stored(driver)
        driver.purge()
        driver.unmap()

        assert driver.purge() == "the cache has no store"
        assert not list((tmp_path / "disk").glob("*.store*"))


def test_store_that_is_off_is_not_purged(tmp_path: Path) -> None:
    """A store that the mover may not use is not purged: the answer says why, and no file is touched."""
    with _served(tmp_path / "disk", Pools()) as driver:
        _stored(driver)
        file = _file(tmp_path / "disk")
        file.chmod(0o644)

        assert "chmod 0600" in driver.purge()
        assert "chmod 0600" in driver.purge()
        assert file.exists()


def test_store_that_is_known_is_not_looked_through(tmp_path: Path) -> None:
    """A daemon that knows the store's file is served at once, and is told no slots."""
    with _served(tmp_path / "disk", Pools()) as driver:
        _stored(driver)
        driver.until_on()
        driver.unmap()
        driver.map(driver.statuses[-1].file_id)

        done = driver.load(SLOTS, labels_of(SLOTS), BLOCKS)

        assert _served_blocks(driver, done) == _contents(driver)
        assert not driver.found


def test_without_a_directory_the_store_is_off() -> None:
    """Without a directory the store is off with that reason, and no batch is done."""
    with _served(None, Pools()) as driver:
        assert "disk_dir" in driver.until_off()
        assert not driver.load([0], labels_of([0]), [0]).is_done


def test_store_comes_back_by_itself(tmp_path: Path) -> None:
    """If the directory is removed, the next batch turns the store off; a new directory is used by itself."""
    with _served(tmp_path / "disk", Pools()) as driver:
        _stored(driver)
        driver.until_on()
        for path in (tmp_path / "disk").iterdir():
            path.unlink()
        (tmp_path / "disk").rmdir()

        refused = driver.load(SLOTS, labels_of(SLOTS), BLOCKS)
        reason = driver.until_off()
        (tmp_path / "disk").mkdir(0o700)
        driver.until_on()
        missed = driver.load(SLOTS, labels_of(SLOTS), BLOCKS)

        assert not refused.is_done
        path = tmp_path / "disk" / f"{Pools().shape.digest}.0.store"
        assert reason == f"{path} was removed; keep others from removing it; it is made anew, empty"
        assert len(missed.failed) == len(SLOTS)
        assert len({status.file_id for status in driver.statuses if status.is_on}) == 2
        _stored(driver)


def test_flow_of_stores_keeps_no_other_store_waiting(tmp_path: Path) -> None:
    """While one cache stores without a pause, another's store is looked through, and one that is off is tried again."""
    pools = Pools(num_disk_slots=64)
    other = replace(pools.message(), pool=9, num_disk_slots=3000, store_id="bb")
    shape = replace(pools.shape, num_slots=3000, store_id="bb")
    name = tmp_path / "disk" / f"{shape.digest}.0.store"
    with _served(tmp_path / "disk", pools) as driver:
        driver.until_on()
        name.mkdir()
        hosts = list(range(8))
        sums = _fill(driver, hosts, hosts)

        def send() -> None:
            driver.send(Direction.STORE, hosts, hosts, labels_of(hosts), sums)

        for _ in range(2):
            send()
        driver.map_other(other)
        # Two more batches are sent for each answer, so that there is never an idle moment.
        for _ in range(400):
            driver.answer()
            send()
            if 9 in driver.looked_through:
                break
            if name.is_dir() and any(one.pool == 9 for one in driver.statuses):
                name.rmdir()
        assert 9 in driver.looked_through
        for _ in range(2):
            driver.answer()


def test_store_that_took_the_place_of_another_is_looked_through(tmp_path: Path) -> None:
    """A file that the daemon does not know is named, and its content is told, whichever file it knew before."""
    for name in ("one", "two"):
        with _served(tmp_path / name, Pools()) as driver:
            _stored(driver, slots=SLOTS if name == "one" else SLOTS[::-1])
            driver.until_on()
            known = driver.statuses[-1].file_id

    with _served(tmp_path / "one", Pools(), file_id=known) as driver:
        driver.until_on()
        assert driver.statuses[-1].file_id != known
        assert sorted(driver.look()) == sorted(SLOTS)
        _file(tmp_path / "one").unlink()
        _file(tmp_path / "two").rename(tmp_path / "one" / f"{Pools().shape.digest}.0.store")
        assert not driver.load([0], labels_of([0]), [0]).is_done
        driver.until_off()
        driver.found.clear()
        driver.has_looked = False

        driver.until_on()

        assert driver.statuses[-1].file_id == known
        assert sorted(driver.look()) == sorted(SLOTS)


_SHAPE = Pools().shape


_CUT = {
    "among its slots": ([_SHAPE.slot_offset_bytes(9)], [9, 15]),
    "behind its head": ([BYTES_PER_CELL], SLOTS),
    "within its head": ([100], SLOTS),
    "to nothing": ([0], SLOTS),
    "to nothing, and written to": ([0, 500], SLOTS),
    "made longer": ([_SHAPE.file_bytes + 5000], []),
}
"""The lengths in bytes that a store's file gets one after the other, and the slots that this loses."""


@pytest.mark.parametrize(
    ("lengths", "lost", "is_asked"),
    [
        pytest.param(*cut, is_asked, id=f"{name}, {'asked' if is_asked else 'looked at'}")
        for name, cut in _CUT.items()
        for is_asked in (True, False)
        # A look may fall between two lengths, so what it finds is known for one alone.
        if is_asked or len(cut[0]) == 1
    ],
)
def test_truncated_store_loses_only_what_was_cut_off(
    tmp_path: Path, lengths: list[int], lost: list[int], *, is_asked: bool
) -> None:
    """A file of another length turns the store off without a crash; made whole, it has all that was not cut off."""
    with _served(
        tmp_path / "disk", Pools(), seconds_between_looks=60 if is_asked else 0.02
    ) as driver:
        _stored(driver)
        driver.until_on()
        driver.look()
        driver.found.clear()
        driver.has_looked = False
        for num_bytes in lengths:
            os.truncate(_file(tmp_path / "disk"), num_bytes)

        if is_asked:
            assert not driver.load(SLOTS, labels_of(SLOTS), BLOCKS).is_done
        reason = driver.until_off()
        assert reason.startswith(f"{_file(tmp_path / 'disk')} has {lengths[-1]} bytes, not ")
        assert reason.endswith("; keep others from changing it; it is made whole again by itself")
        driver.until_on()
        done = driver.load(SLOTS, labels_of(SLOTS), BLOCKS)

        assert sorted(driver.look()) == sorted(set(SLOTS) - set(lost))
        assert done.failed == tuple(sorted(SLOTS.index(slot) for slot in lost))
        assert _file(tmp_path / "disk").stat().st_size == _SHAPE.file_bytes
        _stored(driver)
        assert not driver.load(SLOTS, labels_of(SLOTS), BLOCKS).failed


def test_overwritten_store_is_on_again_with_what_was_left(tmp_path: Path) -> None:
    """If a store's head and a slot are overwritten, it is looked through anew and has all slots but that one."""
    directory, pools = tmp_path / "disk", Pools()
    with _served(directory, pools, seconds_between_looks=0.02) as driver:
        _stored(driver)
        driver.until_on()
        driver.look()
        known = driver.statuses[-1].file_id
        driver.found.clear()
        driver.has_looked = False
        with _file(directory).open("r+b") as file:
            file.write(bytes(pools.shape.cell_offset_bytes(SLOTS[0] + 1)))

        assert "overwritten" in driver.until_off()
        driver.until_on()

        assert driver.statuses[-1].file_id != known
        assert sorted(driver.look()) == sorted(set(SLOTS) - set(range(SLOTS[0] + 1)))


def test_store_that_was_moved_away_turns_off_without_being_asked(tmp_path: Path) -> None:
    """An idle store is off while its directory is open to others or renamed, and on once that is undone."""
    directory = tmp_path / "disk"
    with _served(directory, Pools(), seconds_between_looks=0.02) as driver:
        sums = _stored(driver)
        driver.until_on()
        directory.chmod(0o755)
        assert "0755" in driver.until_off()
        directory.chmod(0o700)
        driver.until_on()
        assert not driver.load(SLOTS, labels_of(SLOTS), BLOCKS, sums).failed

        directory.rename(tmp_path / "elsewhere")
        assert str(directory) in driver.until_off()
        assert not directory.exists()
        (tmp_path / "elsewhere").rename(directory)
        driver.until_on()

        assert not driver.load(SLOTS, labels_of(SLOTS), BLOCKS, sums).failed
        assert len({status.file_id for status in driver.statuses if status.is_on}) == 1
