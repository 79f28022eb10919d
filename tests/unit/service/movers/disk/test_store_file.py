"""A file that fails in part loses that part; a store that fails as a whole says so and claims nothing afterwards."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvleased.movers.cpu import CpuPools
from kvleased.movers.disk.store_file import StoreError, StoreFile, Transfer
from kvleased.movers.disk.store_place import StorePlace
from tests.laws.disks import Pools, labels_of, payload_of

POOLS = Pools()
SLOTS = [2, 3, 4, 5, 9]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[StorePlace]:
    """A place without a limit."""
    place = StorePlace(tmp_path / "disk", 0)
    yield place
    place.leave()


@pytest.fixture
def path(place: StorePlace, tmp_path: Path) -> Path:
    """The file of a store in which each of SLOTS holds the content with its own number."""
    _write(place.open(POOLS.shape))
    (path,) = (tmp_path / "disk").glob("*.store")
    return path


def _transfer(others: list[int]) -> Transfer:
    return Transfer(
        slots=np.array(SLOTS, np.int32),
        others=np.array(others, np.int32),
        labels=labels_of(SLOTS),
        checksums=np.zeros(len(SLOTS), np.uint64),
    )


def _write(store: StoreFile) -> None:
    images = np.frombuffer(
        b"".join(payload_of(slot, POOLS.bytes_per_slot) for slot in SLOTS), np.uint8
    ).reshape(len(SLOTS), -1)
    transfer = _transfer(list(range(len(SLOTS))))
    store.write(transfer, images, POOLS.bytes_per_slot, lambda: None)


def _split(path: Path, payload: Path, flags: int) -> StoreFile:
    """Return a store with its cells in one file and its payloads in another, which is opened with `flags`."""
    return StoreFile(
        POOLS.shape,
        path,
        "ab",
        os.open(path, os.O_RDWR),
        os.open(payload, flags),
        ThreadPoolExecutor(1),
    )


def _read(store: StoreFile) -> tuple[list[int], list[bytes]]:
    """Read SLOTS; return the positions that failed and the bytes of all blocks."""
    device = np.zeros(POOLS.num_blocks * POOLS.bytes_per_block, np.uint8)
    pools = CpuPools.laid(
        (device,),
        np.zeros(0, np.uint8),
        num_blocks=POOLS.num_blocks,
        bytes_per_slot=POOLS.bytes_per_slot,
        pieces=POOLS.message().pieces,
    )
    failed = store.read(_transfer(list(range(len(SLOTS)))), pools)
    blocks = device.reshape(POOLS.num_blocks, -1)
    return failed, [block.tobytes() for block in blocks[: len(SLOTS)]]


def _claims(store: StoreFile) -> list[int]:
    slots, _ = store.found(0, POOLS.num_disk_slots)
    return [int(slot) for slot in slots]


def test_reading_notes_the_use_now_and_then(path: Path) -> None:
    """A store that is only read counts as used long before it is closed, but not each read writes that down."""
    store = _split(path, path, os.O_RDWR)
    os.utime(path, (1, 1))

    _read(store)
    noted_at = path.stat().st_mtime_ns
    _read(store)

    assert noted_at > 10**9
    assert path.stat().st_mtime_ns == noted_at
    store.close()


def test_slots_that_cannot_be_read_are_lost_alone(path: Path, tmp_path: Path) -> None:
    """Of adjacent slots that are read at once, only those that cannot be read are lost."""
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[: POOLS.shape.slot_offset_bytes(4) + 1])
    store = _split(path, cut, os.O_RDWR)

    failed, blocks = _read(store)

    assert failed == [2, 3, 4]
    assert blocks[:2] == [payload_of(slot, POOLS.bytes_per_block) for slot in SLOTS[:2]]
    assert blocks[2:] == [bytes(POOLS.bytes_per_block)] * 3
    store.close()


def test_slot_that_cannot_be_read_now_keeps_its_label(path: Path) -> None:
    """A read error is a miss but no proof of wrong bytes, so the next life may try the slot again."""
    store = _split(path, path, os.O_WRONLY)

    failed, _ = _read(store)

    assert failed == list(range(len(SLOTS)))
    assert _claims(store) == SLOTS
    store.close()


def test_cells_that_cannot_be_read_hold_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If cells cannot be read, as in a bad sector, their slots are misses, and the store goes on."""
    store, bad = _split(path, path, os.O_RDWR), POOLS.shape.cell_offset_bytes(SLOTS[1])
    preadv = os.preadv

    def failing(fd: int, parts: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(map(len, parts)):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, parts, offset)

    monkeypatch.setattr(os, "preadv", failing)

    assert _claims(store) == [slot for slot in SLOTS if slot != SLOTS[1]]
    failed, blocks = _read(store)
    assert failed == [1]
    assert blocks[0] == payload_of(SLOTS[0], POOLS.bytes_per_block)
    store.close()


def test_failed_write_leaves_no_claims(path: Path) -> None:
    """If payloads cannot be written, the store says so, and no slot of the batch claims to hold anything."""
    store = _split(path, path, os.O_RDONLY)

    with pytest.raises(StoreError, match="write"):
        _write(store)

    assert _claims(store) == []
    store.close()


def test_closed_store_is_an_error(place: StorePlace) -> None:
    """Using a store after it was closed is an error, and reaches no other file."""
    store = place.open(POOLS.shape)
    place.close(store)

    with pytest.raises(StoreError):
        _write(store)
    with pytest.raises(StoreError):
        _read(store)
    with pytest.raises(StoreError):
        _claims(store)


def test_others_have_their_turn_in_the_middle_of_a_write(place: StorePlace) -> None:
    """A write of many bytes yields to others before its end, at a time when none of its slots claims anything."""
    pools = Pools(num_disk_slots=20, bytes_per_slot=2 << 20)
    store = place.open(pools.shape)
    images = np.zeros((1, pools.bytes_per_slot), np.uint8)
    slots = np.arange(20, dtype=np.int32)
    transfer = Transfer(
        slots=slots,
        others=np.zeros(20, np.int32),
        labels=labels_of(slots.tolist()),
        checksums=np.zeros(20, np.uint64),
    )
    claims: list[int] = []

    store.write(
        transfer, images, pools.bytes_per_slot, lambda: claims.append(len(store.found(0, 20)[0]))
    )

    assert claims == [0, 0]
    assert len(store.found(0, 20)[0]) == 20
