"""A mover carries out packets at once, and readies its memory while no packet comes."""

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from kvleased.core.effects import Direction
from kvleased.memory import cpu, holes
from kvleased.movers import protocol
from kvleased.movers.engine import Engine, slots_bytes_of
from kvleased.movers.protocol import Batch, Completion, Piece, PoolMap

NUM_BLOCKS, NUM_SLOTS, BYTES_PER_BLOCK = 64, 32, 64 << 10
POOLS = PoolMap(
    pool=1,
    num_blocks=NUM_BLOCKS,
    num_slots=NUM_SLOTS,
    bytes_per_slot=BYTES_PER_BLOCK,
    device_bytes=(NUM_BLOCKS * BYTES_PER_BLOCK,),
    pieces=(
        Piece(
            rank=0,
            offset_bytes=0,
            block_stride_bytes=BYTES_PER_BLOCK,
            num_bytes=BYTES_PER_BLOCK,
            slot_offset_bytes=0,
        ),
    ),
)


@pytest.fixture
def pool_fds() -> Iterator[list[int]]:
    """A device pool and a host pool whose pages all exist, but are in no page table of this process."""
    fds = []
    for name, num_blocks in (("device", NUM_BLOCKS), ("host", NUM_SLOTS)):
        fds.append(os.memfd_create(name, os.MFD_CLOEXEC))
        os.posix_fallocate(fds[-1], 0, num_blocks * BYTES_PER_BLOCK)
    yield fds
    for fd in fds:
        os.close(fd)


@pytest.fixture
def link() -> Iterator[socket.socket]:
    """The daemon's end of the link to an engine that runs until the test ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = Thread(target=Engine(theirs).run)
    thread.start()
    with ours, theirs:
        ours.settimeout(10)
        assert ours.recv(protocol.PACKET_BYTES_MAX) == protocol.HERE
        yield ours
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()


def _answer(
    link: socket.socket, direction: Direction = Direction.OFFLOAD, *, pool: int = 1
) -> Completion:
    ids = np.arange(NUM_SLOTS, dtype=np.int32).tobytes()
    batch = Batch(
        number=1,
        pool=pool,
        direction=direction,
        with_checksums=False,
        source_ids=b"" if direction is Direction.SCRUB else ids,
        target_ids=ids,
    )
    link.send(batch.encode())
    return Completion.decode(link.recv(protocol.PACKET_BYTES_MAX))


def test_copies_are_carried_out_until_the_pools_are_unmapped(
    link: socket.socket, pool_fds: list[int]
) -> None:
    """A batch right after its pools is done, even if not all memory is ready; after the unmapping it is refused."""
    device = cpu.map_region(pool_fds[0], NUM_BLOCKS * BYTES_PER_BLOCK)
    device[:] = 7

    first, pieces = POOLS.packets()
    socket.send_fds(link, [first], pool_fds)
    link.send(pieces)
    done = _answer(link)
    link.send(protocol.encode_unmap(1))
    refused = _answer(link)

    assert (done.is_done, refused.is_done) == (True, False)
    assert os.pread(pool_fds[1], 1, NUM_SLOTS * BYTES_PER_BLOCK - 1) == b"\7"


def test_pool_that_cannot_be_mapped_costs_its_own_copies_alone(
    link: socket.socket, pool_fds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool of more bytes than there are addresses is told in the log with what to do; other pools are copied on."""
    first, pieces = POOLS.packets()
    socket.send_fds(link, [first], pool_fds)
    link.send(pieces)
    vast, pieces = replace(POOLS, pool=2, device_bytes=(1 << 50,)).packets()
    vast_fd = os.memfd_create("vast", os.MFD_CLOEXEC)
    os.ftruncate(vast_fd, 1 << 50)
    socket.send_fds(link, [vast], [vast_fd, pool_fds[1]])
    os.close(vast_fd)
    link.send(pieces)

    refused, done = _answer(link, pool=2), _answer(link)

    assert (refused.is_done, done.is_done) == (False, True)
    kept = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    assert not any("vast" in str(one.readlink()) for one in kept)
    told, batch = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (told["event"], told["pool"], batch["event"]) == ("pool_not_mapped", 2, "batch_refused")
    assert (told["reason"], "ulimit -v" in told["advice"]) == ("Cannot allocate memory", True)


def test_host_pool_whose_file_was_cut_off_costs_its_own_copies_alone(
    link: socket.socket, pool_fds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """After the host pool's file was cut off its copies are refused, and others are done: reading there would kill.

    The log says what the refused copy names, how much is left, and which line says what to do.
    """
    whole = cpu.map_region(pool_fds[0], NUM_BLOCKS * BYTES_PER_BLOCK)
    whole[:] = 7
    os.ftruncate(pool_fds[1], BYTES_PER_BLOCK)

    first, pieces = POOLS.packets()
    socket.send_fds(link, [first], pool_fds)
    link.send(pieces)
    refused = _answer(link)
    done = _answer(link, Direction.SCRUB)

    assert (refused.is_done, done.is_done) == (False, True)
    told = capsys.readouterr().err
    assert f"it names {NUM_SLOTS - 1} of the host tier, which has 0" in told
    assert "if the host pool's file in host_dir was truncated, host_file_cut_off says" in told
    assert not whole[: NUM_SLOTS * BYTES_PER_BLOCK].any()


def test_file_that_cannot_be_asked_counts_as_whole(pool_fds: list[int]) -> None:
    """If a file's size cannot be asked for, the file counts as whole, and the mover goes on."""
    assert slots_bytes_of(POOLS, [pool_fds[0], -1]) == NUM_SLOTS * BYTES_PER_BLOCK


def test_idle_mover_readies_all_of_its_memory(pool_fds: list[int]) -> None:
    """While no packet comes, every page of the pools is entered; after that it costs no more time."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        engine = Engine(theirs)
        engine._map(POOLS, [os.dup(fd) for fd in pool_fds])

        engine._touch_while_idle()

        assert _entered_bytes(pool_fds) == (NUM_BLOCKS + NUM_SLOTS) * BYTES_PER_BLOCK
    assert not engine._untouched


@pytest.mark.parametrize("is_mapped_before", [False, True])
def test_idle_mover_leaves_a_pool_alone_that_was_made_smaller(
    pool_fds: list[int], is_mapped_before: bool
) -> None:
    """A mover that maps a pool, or has begun to ready it, does not bring back pages that were given back."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hole = (5 * BYTES_PER_BLOCK, 9 * BYTES_PER_BLOCK)
    with ours, theirs:
        engine = Engine(theirs)
        if not is_mapped_before:
            holes.give_back(pool_fds[0], [hole], NUM_BLOCKS * BYTES_PER_BLOCK)
        engine._map(POOLS, [os.dup(fd) for fd in pool_fds])
        if is_mapped_before:
            holes.give_back(pool_fds[0], [hole], NUM_BLOCKS * BYTES_PER_BLOCK)

        engine._touch_while_idle()

        assert _entered_bytes(pool_fds) == NUM_SLOTS * BYTES_PER_BLOCK
    missing_bytes = holes.missing_bytes(pool_fds[0], NUM_BLOCKS * BYTES_PER_BLOCK)
    assert missing_bytes == 4 * BYTES_PER_BLOCK


def _entered_bytes(fds: list[int]) -> int:
    """Return how many bytes of some files are in this process's page tables."""
    inodes = {str(os.fstat(fd).st_ino) for fd in fds}
    num_kib, is_counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_counted = words[4] in inodes
        elif words[0] == "Rss:" and is_counted:
            num_kib += int(words[1])
    return num_kib << 10


def test_packet_ends_the_readying(pool_fds: list[int]) -> None:
    """A packet that has already come does not wait for any page."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        engine = Engine(theirs)
        engine._map(POOLS, [os.dup(fd) for fd in pool_fds])
        ours.send(protocol.encode_unmap(1))

        engine._touch_while_idle()

        assert not _entered_bytes(pool_fds)


def test_mover_ends_quietly_when_the_daemon_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    """If the daemon dies with answers unread, the mover logs one line and no traceback."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.send(b"unread")
        ours.close()

        Engine(theirs).run()

    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "mover_ends"
