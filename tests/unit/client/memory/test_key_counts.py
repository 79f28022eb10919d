"""Laws of key counts as a worker reads them."""

import mmap
import os
import secrets
import struct
from collections import deque

import pytest

from kvlease._checks import check_keys
from kvlease.errors import InvalidError
from kvlease.memory.key_counts import (
    ASK_ALWAYS_AT,
    HEAD,
    HEAD_BYTES,
    MAGIC,
    VERSION,
    KeyCounts,
    num_buckets_for,
    region_bytes,
)

EPOCH = 9
BUCKETS = 4


def region(*, magic: bytes = MAGIC, version: int = VERSION, num_buckets: int = BUCKETS) -> int:
    """Return a descriptor of a region with four buckets, the second of which has a key."""
    fd = os.memfd_create("counts")
    head = HEAD.pack(magic, version, 0, num_buckets, EPOCH).ljust(HEAD_BYTES, b"\0")
    os.write(fd, head + struct.pack("<4I", 0, 1, 0, 0))
    return fd


def mapped(fd: int, epoch: int = EPOCH) -> KeyCounts | None:
    """Map a region and close its descriptor."""
    try:
        return KeyCounts.mapped(fd, region_bytes(BUCKETS), epoch)
    finally:
        os.close(fd)


def key(number: int) -> bytes:
    """Return a key whose low bits are a given number."""
    return number.to_bytes(4, "little") + secrets.token_bytes(28)


def test_key_is_absent_where_its_bucket_counts_nothing() -> None:
    """The low bits of a key alone say which bucket it is in."""
    counts = mapped(region())

    assert counts is not None
    assert repr(counts) == "<KeyCounts 4 buckets>"
    assert counts.absent([key(0), key(1), key(5), key(6)]) == [True, False, False, True]


def test_nothing_is_absent_once_the_writer_took_leave() -> None:
    """Once its writer has left the region, nobody vouches for its counts."""
    fd = region()
    counts = mapped(os.dup(fd))

    with mmap.mmap(fd, 0) as writable:
        writable[ASK_ALWAYS_AT] = 1
    os.close(fd)

    assert counts is not None
    assert counts.absent([key(0), key(1)]) == [False, False]


@pytest.mark.parametrize(
    ("keys", "rule", "words"),
    [
        pytest.param(bytes(64), "wrong_type", "split packed keys every 32 bytes", id="packed"),
        pytest.param(bytearray(64), "wrong_type", "split packed keys", id="packed, changeable"),
        pytest.param("keys", "wrong_type", "a list of 32-byte keys, not 'keys'", id="text"),
        pytest.param(None, "wrong_type", "a list of 32-byte keys, not None", id="nothing"),
        pytest.param({bytes(32)}, "wrong_type", "a list of 32-byte keys", id="no order"),
        pytest.param(
            [bytes(32), 7], "wrong_type", r"keys\[1\] must be .*bytes.*, not 7", id="number"
        ),
        pytest.param(
            [bytes(31)], "wrong_key", r"keys\[0\] has 31 bytes; a key must have 32", id="short"
        ),
    ],
)
def test_what_is_no_list_of_keys_is_refused(keys: object, rule: str, words: str) -> None:
    """An argument that is no list of keys is refused by its name, with what to do."""
    with pytest.raises(InvalidError, match=words) as caught:
        check_keys(keys)
    assert caught.value.rule == rule


def test_lists_of_keys_of_any_kind_are_taken() -> None:
    """Engines have keys in types of their own, and lists of them are taken."""

    class Own(bytes):
        """An engine's key."""

    for keys in ([], (), [key(1)], (key(1), key(2)), deque([key(1)]), [Own(key(1))]):
        check_keys(keys)


@pytest.mark.parametrize(
    "fd",
    [
        pytest.param(lambda: region(magic=b"anything"), id="magic"),
        pytest.param(lambda: region(version=2), id="version"),
        pytest.param(lambda: region(num_buckets=3), id="buckets"),
        pytest.param(lambda: region(num_buckets=8), id="bytes"),
    ],
)
def test_region_of_another_kind_is_not_believed(fd) -> None:  # type: ignore[no-untyped-def]
    """A kind of region that this library does not know is not read."""
    assert mapped(fd()) is None


def test_region_of_another_life_is_not_believed() -> None:
    """Only the region of the daemon that answers counts."""
    assert mapped(region(), epoch=EPOCH + 1) is None


def test_buckets_are_a_power_of_two() -> None:
    """The number of buckets is a power of two, and no fewer than were wanted for each block."""
    assert [num_buckets_for(one, 16) for one in (0, 1, 2, 3, 64)] == [1, 16, 32, 64, 1024]
