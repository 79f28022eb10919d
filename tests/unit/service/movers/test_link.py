"""The daemon's end of a mover answers every copy exactly once, whatever the mover does."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvlease.ids import CopyId
from kvleased.core.commands import CopyDone, CopyFailed, CopyLost, MoverDied
from kvleased.core.effects import Copy, Direction, Mover
from kvleased.core.tier.labels import BYTES_PER_LABEL
from kvleased.movers import protocol
from kvleased.movers.batches import OVERTAKES_MAX, LinkLimits
from kvleased.movers.link import START_SECONDS_MAX, MoverLink
from kvleased.movers.protocol import (
    Ask,
    Batch,
    Completion,
    Found,
    Piece,
    PoolMap,
    Status,
    Told,
)

LIMITS = LinkLimits(seconds_max=10, copies_a_batch_max=4)
SLOW_MOVER = """
import sys
from kvleased.movers.engine import main
sys.stdin.read()
main(int(sys.argv[1]))
"""
"""A mover that starts when its standard input ends."""


@dataclass
class Owner:
    """Remember what the link tells its owner."""

    answers: list[tuple[int, object]] = field(default_factory=list)
    recycled: list[tuple[Mover, int]] = field(default_factory=list)
    heard: list[object] = field(default_factory=list)
    num_gone: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def answer_copy(self, pool: int, command: CopyDone | CopyFailed | CopyLost) -> None:
        """Remember an answer."""
        self.answers.append((pool, command))
        self.changed.set()

    def answer_mover_death(self, command: MoverDied) -> None:
        """Remember a death."""
        self.answers.append((0, command))

    def recycle_mover(self, mover: Mover, generation: int) -> None:
        """Remember a request to replace a mover."""
        self.recycled.append((mover, generation))

    def hear(self, mover: Mover, said: object) -> None:
        """Remember a store's message."""
        assert mover is Mover.DISK
        self.heard.append(said)
        self.changed.set()

    def mover_went(self, mover: Mover) -> None:
        """Count how often the mover's end was closed."""
        assert mover in Mover
        self.num_gone += 1


class ScriptedMover:
    """A mover that does what the test says, one packet at a time."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)

    def close(self) -> None:
        """Close the mover's end; the other one is the link's."""
        self.ours.close()

    async def start(self, link: MoverLink, generation: int = 1) -> None:
        """Attach, say so, and return when the link has heard it."""
        link.attach(self.theirs, generation)
        self.ours.send(protocol.HERE)
        async with asyncio.timeout(5):
            while not link.is_answering:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)

    def packets(self) -> list[bytes]:
        """Return the packets that have come."""
        found: list[bytes] = []
        while True:
            try:
                packet = self.ours.recv(protocol.PACKET_BYTES_MAX)
            except BlockingIOError:
                return found
            if not packet:
                return found
            found.append(packet)

    def batches(self) -> list[Batch]:
        """Return the batches that have come."""
        return [Batch.decode(packet) for packet in self.packets() if packet[:1] == protocol.BATCH]

    def complete(self, batch: Batch, *, is_done: bool = True, failed: tuple[int, ...] = ()) -> None:
        """Answer a batch."""
        sums = batch.target_ids * 2 if is_done else b""
        self.ours.send(
            Completion(number=batch.number, is_done=is_done, checksums=sums, failed=failed).encode()
        )

    async def carry_out(self, num_batches: int) -> list[Batch]:
        """Answer so many batches, and return them in the order in which they came."""
        found: list[Batch] = []
        async with asyncio.timeout(5):
            while len(found) < num_batches:
                for batch in self.batches():
                    self.complete(batch)
                    found.append(batch)
                await asyncio.sleep(0)
        return found


def _copy(
    copy_id: int, count: int = 2, direction: Direction = Direction.OFFLOAD, labels: bytes = b""
) -> Copy:
    ids = np.arange(count, dtype=np.int32).tobytes()
    return Copy(
        copy_id=CopyId(copy_id),
        direction=direction,
        source_ids=ids,
        target_ids=ids,
        checksums=b"",
        labels=labels,
    )


def _pool(bytes_per_block: int = 64) -> PoolMap:
    piece = Piece(
        rank=0,
        offset_bytes=0,
        block_stride_bytes=bytes_per_block,
        num_bytes=bytes_per_block,
        slot_offset_bytes=0,
    )
    return PoolMap(
        pool=7,
        num_blocks=1,
        num_slots=0,
        bytes_per_slot=bytes_per_block,
        device_bytes=(bytes_per_block,),
        pieces=(piece,),
    )


@pytest.fixture
def owner() -> Owner:
    """An owner that has heard nothing yet."""
    return Owner()


@pytest.fixture
async def link(owner: Owner) -> AsyncIterator[MoverLink]:
    """A link without a mover, with batches of up to 4 copies and a deadline of 10 seconds."""
    link = MoverLink(owner, LIMITS)
    yield link
    link.close()


@pytest.fixture
async def mover(link: MoverLink) -> AsyncIterator[ScriptedMover]:
    """The first mover, attached."""
    with closing(ScriptedMover()) as mover:
        await mover.start(link)
        yield mover


async def _heard(owner: Owner) -> None:
    async with asyncio.timeout(5):
        await owner.changed.wait()
    owner.changed.clear()


async def _come(mover: ScriptedMover, count: int) -> list[Batch]:
    """Wait until so many batches have come, one batch of a copy in each turn of the loop."""
    found: list[Batch] = []
    async with asyncio.timeout(5):
        while len(found) < count:
            await asyncio.sleep(0)
            found += mover.batches()
    return found


async def test_copy_is_split_and_answered_as_one(
    link: MoverLink, mover: ScriptedMover, owner: Owner
) -> None:
    """A copy above a batch's limit is sent as several batches and answered once, with positions over all of them."""
    link.send(7, _copy(1, 10), with_checksums=True)
    batches = await _come(mover, 2)
    mover.complete(batches[0])
    batches += await _come(mover, 1)
    assert [batch.num_copies for batch in batches] == [4, 4, 2]

    for batch, failed in zip(batches[1:], [(1,), (0,)], strict=True):
        mover.complete(batch, failed=failed)
    await _heard(owner)

    ids = np.arange(10, dtype=np.int32)
    sums = b"".join(ids[start : start + 4].tobytes() * 2 for start in (0, 4, 8))
    assert owner.answers == [(7, CopyDone(copy_id=CopyId(1), checksums=sums, failed=(5, 8)))]


async def test_refused_part_fails_the_copy(
    link: MoverLink, mover: ScriptedMover, owner: Owner
) -> None:
    """A copy with a refused part fails once all of its parts have ended."""
    link.send(7, _copy(1, 8), with_checksums=True)
    first, second = await _come(mover, 2)

    mover.complete(first, is_done=False)
    mover.complete(second)
    await _heard(owner)

    assert owner.answers == [(7, CopyFailed(copy_id=CopyId(1)))]


async def test_batches_of_a_copy_leave_in_turns_of_their_own(
    link: MoverLink, mover: ScriptedMover
) -> None:
    """The call that asks for a long copy sends none of it, and the loop serves others between two batches."""
    heard: list[str] = []
    loop = asyncio.get_running_loop()

    link.send(7, _copy(1, 8), with_checksums=False)
    assert mover.batches() == []
    await _come(mover, 1)
    loop.call_soon(heard.append, "other")
    await _come(mover, 1)

    assert heard == ["other"]


async def test_end_of_a_long_copy_is_answered_in_a_turn_of_its_own(
    link: MoverLink, mover: ScriptedMover, owner: Owner
) -> None:
    """A long copy is answered in a turn of its own, after the turn that hears of its last batch."""
    link.send(7, _copy(1, 8), with_checksums=False)
    first, second = await _come(mover, 2)
    mover.complete(first)
    mover.complete(second)
    while link.batches_in_flight:
        assert owner.answers == []
        await asyncio.sleep(0)
    await _heard(owner)

    assert [pool for pool, _ in owner.answers] == [7]


async def test_overdue_copy_is_lost_and_its_mover_replaced(
    link: MoverLink, mover: ScriptedMover, owner: Owner
) -> None:
    """A copy that a mover does not answer in time is lost, and the link asks for another mover."""
    link.send(7, _copy(1), with_checksums=False)
    now = asyncio.get_running_loop().time()

    link.tick(now + 5)
    assert owner.answers == []
    link.tick(now + 20)

    assert owner.answers == [(7, CopyLost(copy_id=CopyId(1)))]
    assert owner.recycled == [(Mover.MEMORY, 1)]
    assert mover.batches()


async def test_mover_that_only_owes_an_answer_to_a_question_is_replaced(owner: Owner) -> None:
    """A store's mover that answers no question is replaced even if it has no copy; one that answers is not."""
    link = MoverLink(owner, LIMITS, Mover.DISK)
    with closing(ScriptedMover()) as mover:
        await mover.start(link)
        assert link.ask(Ask(number=1, pool=7, labels=b""))
        mover.ours.send(Told(number=1).encode())
        async with asyncio.timeout(5):
            while not owner.heard:
                await _heard(owner)
        now = asyncio.get_running_loop().time()
        link.tick(now + 20)
        assert owner.recycled == []

        assert link.ask(Ask(number=2, pool=7, labels=b""))
        link.tick(now + 5)
        assert owner.recycled == []
        link.tick(now + 20)

        assert owner.recycled == [(Mover.DISK, 1)]
        assert owner.num_gone == 1


async def test_copy_that_no_mover_got_has_failed(link: MoverLink, owner: Owner) -> None:
    """Without a mover a copy waits and fails at its deadline, since nobody can be writing its targets."""
    link.send(7, _copy(1), with_checksums=False)

    link.tick(asyncio.get_running_loop().time() + 20)

    assert owner.answers == [(7, CopyFailed(copy_id=CopyId(1)))]
    assert owner.recycled == []


async def test_dead_mover_ends_everything_on_its_way(
    link: MoverLink, mover: ScriptedMover, owner: Owner
) -> None:
    """When a mover is proven dead the cores are told once, and its copies are not sent to the next mover."""
    link.send(7, _copy(1), with_checksums=False)

    link.died(1)
    with closing(ScriptedMover()) as following:
        await following.start(link, 2)
        link.send(7, _copy(2), with_checksums=False)

        assert owner.answers == [(0, MoverDied())]
        assert len(following.batches()) == 1
    assert mover.batches()


async def test_next_mover_maps_the_pools_first(link: MoverLink, mover: ScriptedMover) -> None:
    """A new mover is told of every pool before it gets copies that waited for it."""
    fd = os.memfd_create("test")
    link.map(_pool(), [fd])
    kinds = [protocol.MAP, protocol.PIECES]
    assert [packet[:1] for packet in mover.packets()] == kinds
    link.died(1)
    link.send(7, _copy(1), with_checksums=False)

    with closing(ScriptedMover()) as following:
        await following.start(link, 2)

        assert [packet[:1] for packet in following.packets()] == [*kinds, protocol.BATCH]
    os.close(fd)


async def test_full_socket_delays_and_loses_nothing(
    link: MoverLink, mover: ScriptedMover, owner: Owner
) -> None:
    """Batches above a mover's limit are sent as it answers, in their order."""
    for number in range(3_000):
        link.send(7, _copy(number), with_checksums=False)
    answered = 0
    while answered < 3_000:
        for batch in mover.batches():
            mover.complete(batch)
            answered += 1
            if answered % 100 == 0:
                await _heard(owner)
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        while len(owner.answers) < 3_000:  # noqa: ASYNC110 - the answers come by callbacks of the loop
            await asyncio.sleep(0)

    assert [answer.copy_id for _, answer in owner.answers] == list(range(3_000))  # type: ignore[attr-defined]
    assert repr(link) == "<MoverLink mover 1, 0 batches in flight>"


async def test_pool_that_goes_before_its_mover_heard_of_it_costs_no_mover(
    link: MoverLink, mover: ScriptedMover, owner: Owner
) -> None:
    """If a mover does not read, pools that come and go again wait for it without the descriptors, which are closed."""
    fd = os.memfd_create("test")
    for number in range(1_000):
        link.map(replace(_pool(), pool=number), [fd])
    for number in range(1_000):
        link.unmap(number)
    os.close(fd)
    found: list[bytes] = []
    while packets := mover.packets():
        found += packets
        await asyncio.sleep(0.01)

    gone = [packet for packet in found if packet[:1] == protocol.UNMAP]
    assert (owner.num_gone, len(gone)) == (0, 1_000)


async def test_few_batches_are_out_of_hand_at_once(link: MoverLink, mover: ScriptedMover) -> None:
    """A mover gets the next batch when it has answered one; figures tell where the other batches are."""
    for number in range(5):
        link.send(7, _copy(number), with_checksums=False)

    sent = mover.batches()
    figures = link.figures(asyncio.get_running_loop().time() + 3)

    assert (len(sent), figures.num_sent, figures.num_waiting) == (2, 2, 3)
    assert figures.oldest_seconds >= 3
    mover.complete(sent[0])
    async with asyncio.timeout(5):
        while not (more := mover.batches()):  # noqa: ASYNC110 - it is sent in a later turn of the loop
            await asyncio.sleep(0)
    assert len(more) == 1


@pytest.mark.parametrize(
    ("urgent", "other"),
    [
        pytest.param(Direction.RELOAD, Direction.OFFLOAD, id="host"),
        pytest.param(Direction.SCRUB, Direction.OFFLOAD, id="scrub"),
        pytest.param(Direction.DUPLICATE, Direction.OFFLOAD, id="fork"),
        pytest.param(Direction.LOAD, Direction.STORE, id="disk"),
        pytest.param(Direction.FETCH, Direction.SHARE, id="remote"),
    ],
)
async def test_what_somebody_waits_for_overtakes_what_is_written_back(
    link: MoverLink, mover: ScriptedMover, urgent: Direction, other: Direction
) -> None:
    """Of batches that are not sent yet, those that a request waits for go first, in their order."""
    for number in range(4):
        link.send(7, _copy(number, direction=other), with_checksums=False)
    for number in range(4, 6):
        link.send(7, _copy(number, direction=urgent), with_checksums=False)

    batches = await mover.carry_out(6)

    assert [batch.direction for batch in batches] == [other] * 2 + [urgent] * 2 + [other] * 2
    assert [batch.number for batch in batches] == list(range(1, 7))


async def test_urgent_batches_are_sent_beside_what_is_written_back(
    link: MoverLink, mover: ScriptedMover
) -> None:
    """A mover that takes urgent batches during others gets them at once, but only a few of either kind."""
    for number in range(3):
        link.send(7, _copy(number, direction=Direction.STORE), with_checksums=False)
    for number in range(3, 6):
        link.send(7, _copy(number, direction=Direction.LOAD), with_checksums=False)

    sent = mover.batches()
    assert [batch.direction for batch in sent] == [Direction.STORE] * 2 + [Direction.LOAD] * 2
    mover.complete(sent[3])
    following: list[Batch] = []
    async with asyncio.timeout(5):
        while not following:
            await asyncio.sleep(0)
            following = mover.batches()
    assert [batch.direction for batch in following] == [Direction.LOAD]


async def test_what_is_written_back_has_its_turn(link: MoverLink, mover: ScriptedMover) -> None:
    """A batch that was overtaken often enough is sent, however much is urgent."""
    for number in range(4):
        link.send(7, _copy(number), with_checksums=False)
    for number in range(4, 24):
        link.send(7, _copy(number, direction=Direction.RELOAD), with_checksums=False)

    batches = await mover.carry_out(24)

    at = [batch.direction for batch in batches].index(Direction.OFFLOAD, 2)
    assert at == 2 + OVERTAKES_MAX


async def test_batch_is_cut_by_its_bytes_too(owner: Owner) -> None:
    """A batch of large blocks has fewer of them, but at least one."""
    fd = os.memfd_create("test")
    for bytes_per_block, expected in ((300, [3, 1]), (5_000, [1, 1, 1, 1])):
        limits = LinkLimits(seconds_max=10, copies_a_batch_max=100, bytes_a_batch_max=1_000)
        link = MoverLink(owner, limits)
        with closing(ScriptedMover()) as mover:
            await mover.start(link)
            link.map(_pool(bytes_per_block), [fd])
            link.send(7, _copy(1, 4), with_checksums=False)

            assert [batch.num_copies for batch in await mover.carry_out(len(expected))] == expected
            link.close()
    os.close(fd)


async def test_labelled_batch_has_a_packets_worth_of_labels(owner: Owner) -> None:
    """Labels are split as ids are, and no batch has more labels than a packet takes."""
    link = MoverLink(owner, LinkLimits(seconds_max=10, copies_a_batch_max=4096), Mover.DISK)
    count = protocol.LABELS_A_PACKET_MAX + 5
    labels = b"".join(number.to_bytes(BYTES_PER_LABEL, "little") for number in range(count))
    with closing(ScriptedMover()) as mover:
        await mover.start(link)
        link.send(7, _copy(1, count, Direction.STORE, labels), with_checksums=True)

        first, second = await mover.carry_out(2)
        link.close()

    assert (first.num_copies, second.num_copies) == (protocol.LABELS_A_PACKET_MAX, 5)
    assert first.labels + second.labels == labels
    assert len(first.encode()) <= protocol.PACKET_BYTES_MAX


async def test_questions_go_before_batches_and_are_heard(owner: Owner) -> None:
    """A question does not wait for batches; a store's messages reach the owner unchanged."""
    link = MoverLink(owner, LIMITS, Mover.DISK)
    question = Ask(number=1, pool=7, labels=b"")
    assert not link.ask(question)
    with closing(ScriptedMover()) as mover:
        await mover.start(link)
        for number in range(5):
            link.send(7, _copy(number), with_checksums=False)
        assert link.ask(question)
        assert mover.packets()[-1] == question.encode()

        said = [
            Told(number=1, is_present=b"\1"),
            Found(pool=7, slot_ids=b"", labels=b"", checksums=b"", is_last=True),
            Status(is_on=False, reason="full"),
        ]
        for one in said:
            mover.ours.send(one.encode())
        async with asyncio.timeout(5):
            while len(owner.heard) < 3:
                await _heard(owner)

        assert owner.heard == said
        assert owner.num_gone == 0
        link.close()
    assert owner.num_gone == 0


async def test_owner_learns_that_nobody_answers(
    link: MoverLink, mover: ScriptedMover, owner: Owner
) -> None:
    """When a mover's end is closed, dead or not, the owner is told once."""
    mover.close()
    async with asyncio.timeout(5):
        while link.is_attached:  # noqa: ASYNC110 - nothing tells of it but the owner
            await asyncio.sleep(0)

    link.died(1)

    assert owner.num_gone == 1


async def test_copies_of_a_deleted_cache_are_not_sent(
    link: MoverLink, mover: ScriptedMover
) -> None:
    """A deleted cache's waiting batches are dropped, and its pools are unmapped behind the batches already sent."""
    fd = os.memfd_create("test")
    link.map(_pool(), [fd])
    for number in range(5):
        link.send(7, _copy(number), with_checksums=False)

    link.unmap(7)

    kinds = [packet[:1] for packet in mover.packets()]
    assert kinds == [protocol.MAP, protocol.PIECES, *[protocol.BATCH] * 2, protocol.UNMAP]
    assert link.figures(0).num_waiting == 0
    os.close(fd)


async def test_copy_of_which_nothing_was_sent_has_failed_at_the_deadline(
    link: MoverLink, mover: ScriptedMover, owner: Owner
) -> None:
    """Copies that a silent mover was sent are lost, as it may still write; copies that it was not sent have failed."""
    for number in range(3):
        link.send(7, _copy(number), with_checksums=False)

    link.tick(asyncio.get_running_loop().time() + 20)

    kinds = [type(answer) for _, answer in owner.answers]
    assert kinds == [CopyLost, CopyLost, CopyFailed]
    assert mover.batches()


async def test_waiting_copies_can_be_failed_alone(
    link: MoverLink, mover: ScriptedMover, owner: Owner
) -> None:
    """Copies sent whole or in part go on, and copies in other directions wait on."""
    for copy_id, count in ((1, 2), (2, 6), (3, 2)):
        link.send(7, _copy(copy_id, count, Direction.LOAD), with_checksums=False)
    for copy_id in range(4, 7):
        link.send(7, _copy(copy_id, direction=Direction.STORE), with_checksums=False)
    await _come(mover, 2)

    link.fail_waiting({Direction.LOAD})

    assert [answer for _, answer in owner.answers] == [CopyFailed(copy_id=CopyId(3))]
    assert link.batches_in_flight == 6


async def test_next_mover_looks_through_what_was_not_looked_through(link: MoverLink) -> None:
    """A store is looked through by each new mover until one has told its end."""
    fd = os.memfd_create("test")
    link.map(_pool(), [fd])
    told: list[str] = []
    for generation in (1, 2, 3):
        with closing(ScriptedMover()) as mover:
            await mover.start(link, generation)
            told.append(PoolMap.decode(mover.packets()[0]).file_id)
        link.died(generation)
        if generation == 2:
            link.note_file(7, "ab")

    assert told == ["", "", "ab"]
    os.close(fd)


async def test_starting_mover_has_more_time_than_a_batch(link: MoverLink, owner: Owner) -> None:
    """Copies for a starting mover fail at their deadline unsent; it is replaced if its first word is overdue."""
    with closing(ScriptedMover()) as mover:
        link.attach(mover.theirs, 1)
        link.send(7, _copy(1), with_checksums=False)
        now = asyncio.get_running_loop().time()

        link.tick(now + 20)
        assert owner.answers == [(7, CopyFailed(copy_id=CopyId(1)))]
        assert (owner.recycled, mover.packets()) == ([], [])
        link.tick(now + START_SECONDS_MAX + 1)

        assert owner.recycled == [(Mover.MEMORY, 1)]
        assert not link.is_attached


async def test_nothing_is_asked_of_a_starting_mover(link: MoverLink) -> None:
    """A mover that has not said its first word is asked nothing."""
    with closing(ScriptedMover()) as mover:
        link.attach(mover.theirs, 1)

        assert not link.ask(Ask(number=1, pool=7, labels=b""))
        assert mover.packets() == []


async def test_slow_start_of_a_process_is_no_silence(owner: Owner) -> None:
    """A mover that takes longer to start than a batch may take is not killed, and carries out later batches."""
    link = MoverLink(owner, LinkLimits(seconds_max=0.001, copies_a_batch_max=4))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", SLOW_MOVER, str(theirs.fileno())]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]
    )
    assert process.stdin is not None
    theirs.close()
    link.attach(ours, 1)
    link.send(7, _copy(1), with_checksums=False)
    link.tick(asyncio.get_running_loop().time() + 1)
    assert [type(answer) for _, answer in owner.answers] == [CopyFailed]

    process.stdin.close()
    async with asyncio.timeout(60):
        while not link.is_answering:
            link.tick(asyncio.get_running_loop().time())
            await asyncio.sleep(0.01)
    link.send(7, _copy(2), with_checksums=False)
    owner.changed.clear()
    await _heard(owner)

    # The mover has no pools, so it answers that nothing was written.
    assert owner.answers[1:] == [(7, CopyFailed(copy_id=CopyId(2)))]
    assert owner.recycled == []
    link.close()
    assert await process.wait() == 0
