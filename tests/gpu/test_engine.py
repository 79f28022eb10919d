"""A GPU's mover answers every batch, in both directions at once, and hands over the memory that it makes."""

import os
import socket
from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlease.memory.cuda import DeviceMemory
from kvleased.core.effects import Direction
from kvleased.memory.cuda import Gpu
from kvleased.movers import protocol
from kvleased.movers.gpu.allotting import Allocate, Allocated
from kvleased.movers.gpu.engine import CudaEngine
from kvleased.movers.protocol import Batch, Completion, Piece, PoolMap
from kvleased.movers.rows import checksum
from tests.gpu.contents import read, write

NUM_BLOCKS, NUM_SLOTS, NUM_LAYERS = 72, 72, 4


def pools_of(page_bytes: int) -> PoolMap:
    """Return pools with pages of these bytes, layer after layer."""
    return PoolMap(
        pool=1,
        num_blocks=NUM_BLOCKS,
        num_slots=NUM_SLOTS,
        bytes_per_slot=NUM_LAYERS * page_bytes,
        # The second rank has no layer.
        device_bytes=(NUM_LAYERS * NUM_BLOCKS * page_bytes, 0),
        pieces=tuple(
            Piece(
                rank=0,
                offset_bytes=layer * NUM_BLOCKS * page_bytes,
                block_stride_bytes=page_bytes,
                num_bytes=page_bytes,
                slot_offset_bytes=layer * page_bytes,
            )
            for layer in range(NUM_LAYERS)
        ),
    )


class Node:
    """A mover in a thread, the daemon's end of its link, and the memory of one cache."""

    def __init__(self, device: str, page_bytes: int) -> None:
        pools = pools_of(page_bytes)
        self.page_bytes, self.bytes_per_block = page_bytes, pools.bytes_per_slot
        self.device_bytes = pools.device_bytes[0]
        self.link, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(20)
        self.engine = CudaEngine.opened(self.theirs, device)
        self.thread = Thread(target=self.engine.run)
        self.thread.start()
        assert self.link.recv(protocol.PACKET_BYTES_MAX) == protocol.HERE
        self.link.send(Allocate(number=7, num_bytes=self.device_bytes).encode())
        packet, fds, _, _ = socket.recv_fds(self.link, protocol.PACKET_BYTES_MAX, 1)
        self.made = Allocated.decode(packet)
        host_fd = os.memfd_create("host", os.MFD_CLOEXEC)
        os.posix_fallocate(host_fd, 0, NUM_SLOTS * self.bytes_per_block)
        empty_fd = os.memfd_create("empty", os.MFD_CLOEXEC)
        first, pieces = pools.packets()
        socket.send_fds(self.link, [first], [fds[0], empty_fd, host_fd])
        self.link.send(pieces)
        self.memory: DeviceMemory = Gpu.opened(device).map(fds[0], self.device_bytes)
        self.host_fd = host_fd
        for fd in (*fds, empty_fd):
            os.close(fd)

    def send(
        self, number: int, direction: Direction, sources: list[int], targets: list[int]
    ) -> None:
        """Send a batch."""
        batch = Batch(
            number=number,
            pool=1,
            direction=direction,
            with_checksums=True,
            source_ids=np.array(sources, np.int32).tobytes(),
            target_ids=np.array(targets, np.int32).tobytes(),
        )
        self.link.send(batch.encode())

    def answer(self) -> Completion:
        """Return the next answer."""
        return Completion.decode(self.link.recv(protocol.PACKET_BYTES_MAX))

    def fill(self) -> NDArray[np.uint8]:
        """Fill the device pool with random bytes, and return them, indexed by layer, block and byte."""
        content = np.random.default_rng(3).integers(0, 256, self.device_bytes, np.uint8)
        write(self.memory, content)
        return content.reshape(NUM_LAYERS, NUM_BLOCKS, self.page_bytes)

    def blocks(self) -> NDArray[np.uint8]:
        """Return the device pool, indexed by layer, block and byte."""
        return read(self.memory).reshape(NUM_LAYERS, NUM_BLOCKS, self.page_bytes)

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """Return a slot, indexed by layer and byte."""
        found = os.pread(self.host_fd, self.bytes_per_block, slot * self.bytes_per_block)
        return np.frombuffer(found, np.uint8).reshape(NUM_LAYERS, self.page_bytes)

    def close(self) -> None:
        """Let the mover unpin the memory, since its process goes on here, and end it."""
        self.link.send(protocol.encode_unmap(1))
        self.link.shutdown(socket.SHUT_WR)
        self.thread.join()
        self.link.close()
        self.theirs.close()
        os.close(self.host_fd)


@pytest.fixture(params=[4 << 10, 64 << 10], ids=["small slots", "large slots"])
def node(device: str, request: pytest.FixtureRequest) -> Iterator[Node]:
    """Run a mover with one cache; threads sum large slots, and a whole pool of them is offloaded in parts."""
    node = Node(device, request.param)
    yield node
    node.close()


def test_mover_says_what_it_made(node: Node) -> None:
    """The mover sends, with the descriptor, all that another process needs to map the memory."""
    assert node.made.number == 7
    assert node.made.device_uuid == node.memory.device.uuid
    assert node.made.mapped_bytes >= node.device_bytes
    assert not node.made.reason


def test_memory_that_is_not_there_is_told_and_the_mover_goes_on(node: Node) -> None:
    """A refusal by the driver is answered with its reason, and the mover goes on."""
    node.link.send(Allocate(number=8, num_bytes=1 << 46).encode())
    packet, fds, _, _ = socket.recv_fds(node.link, protocol.PACKET_BYTES_MAX, 1)
    node.send(1, Direction.SCRUB, [], [0])

    told = Allocated.decode(packet)
    assert (told.number, fds) == (8, [])
    assert "lower device_bytes" in told.reason
    assert node.answer().is_done


def test_blocks_go_down_and_come_back(node: Node) -> None:
    """Offloaded blocks are in their slots with all layers, and reloaded ones have their old bytes."""
    before = node.fill()

    node.send(1, Direction.OFFLOAD, [5, 6, 40], [3, 9, 4])
    down = node.answer()
    node.send(2, Direction.SCRUB, [], [5, 6, 40])
    scrubbed = node.answer()
    zeros = node.blocks()
    node.send(3, Direction.RELOAD, [3, 9, 4], [5, 6, 40])
    up = node.answer()

    assert (down.number, scrubbed.number, up.number) == (1, 2, 3)
    assert all(one.is_done for one in (down, scrubbed, up))
    images = [np.ascontiguousarray(before[:, block]) for block in (5, 6, 40)]
    sums = np.frombuffer(down.checksums, np.uint64).tolist()
    assert sums == [checksum(image.data) for image in images]
    assert down.num_bytes == 3 * node.bytes_per_block
    assert (node.slot(9) == before[:, 6]).all()
    assert not zeros[:, [5, 6, 40]].any()
    assert (node.blocks() == before).all()


def test_batches_of_all_directions_are_under_way_at_once(node: Node) -> None:
    """Each of many batches in all directions is answered once, in any order, and has moved its own bytes."""
    before = node.fill()
    node.send(1, Direction.OFFLOAD, list(range(32)), list(range(32)))
    assert node.answer().is_done

    for number in range(2, 34, 2):
        node.send(number, Direction.OFFLOAD, [number - 2, number - 1], [number + 30, number + 31])
        node.send(number + 1, Direction.RELOAD, [number - 2], [number + 30])
    answers = [node.answer() for _ in range(32)]

    assert sorted(answer.number for answer in answers) == list(range(2, 34))
    assert all(answer.is_done and not answer.failed for answer in answers)
    after = node.blocks()
    for number in range(2, 34, 2):
        assert (node.slot(number + 31) == before[:, number - 1]).all()
        assert (after[:, number + 30] == before[:, number - 2]).all()


def test_batch_out_of_bounds_is_refused(node: Node) -> None:
    """A batch with blocks out of bounds is refused, and the next one is carried out."""
    before = node.fill()

    node.send(1, Direction.RELOAD, [0, 1], [0, NUM_BLOCKS])
    node.send(2, Direction.SCRUB, [], [NUM_BLOCKS - 1])

    refused, done = node.answer(), node.answer()
    assert (refused.is_done, done.is_done) == (False, True)
    assert (node.blocks()[:, :-1] == before[:, :-1]).all()


def test_pools_are_let_go_of_after_what_was_sent_before(node: Node) -> None:
    """A batch right before the unmapping is carried out; one after it is refused."""
    before = node.fill()

    node.send(1, Direction.OFFLOAD, list(range(NUM_BLOCKS)), list(range(NUM_SLOTS)))
    node.link.send(protocol.encode_unmap(1))
    node.send(2, Direction.SCRUB, [], [0])

    done, refused = node.answer(), node.answer()
    assert (done.is_done, refused.is_done) == (True, False)
    images = [np.ascontiguousarray(before[:, block]) for block in range(NUM_BLOCKS)]
    sums = np.frombuffer(done.checksums, np.uint64).tolist()
    assert sums == [checksum(image.data) for image in images]
    assert all((node.slot(slot) == before[:, slot]).all() for slot in range(NUM_SLOTS))
    assert (node.blocks() == before).all()
