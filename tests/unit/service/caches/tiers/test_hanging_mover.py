"""Laws of a memory mover that hangs: the host pool is off until it answers, and copies not yet sent fail."""

import asyncio
import socket

import numpy as np
import pytest

from kvlease.ids import CopyId
from kvleased.caches.entries import CacheEntry
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Direction, Tier
from kvleased.movers import protocol
from kvleased.movers.protocol import Batch, Completion

from .conftest import Node, cache_of, packets

REASON = (
    "no copy has ended for 3 s, so its mover is hanging, or memory is too slow; "
    "after 30 s its mover will be replaced"
)
"""The reason, with the default of the setting in seconds."""


async def test_host_pool_is_off_while_its_mover_hangs(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """The host pool is off, and copies in any direction that the mover was not sent have failed."""
    entry, end = node.registry.cache("shallow"), ends["mover"]
    for number in range(4):
        _send(node, entry, number, Direction.RELOAD if number < 3 else Direction.OFFLOAD)
    now = asyncio.get_running_loop().time()

    node.tiers.tick(now + 2)
    assert node.take() == []
    node.tiers.tick(now + 4)
    off, shown = node.take(), _shown(entry)
    first = next(one for one in packets(end) if one[:1] == protocol.BATCH)
    end.send(Completion(number=Batch.decode(first).number, is_done=True).encode())
    await node.until(1)
    node.tiers.tick(asyncio.get_running_loop().time())

    is_off, is_on = (c.TierChanged(tier=Tier.HOST, is_on=is_on) for is_on in (False, True))
    assert [one for one in off if one[1] == is_off] == [("deep", is_off), ("shallow", is_off)]
    failed = [command.copy_id for _, command in off if isinstance(command, c.CopyFailed)]
    assert failed == [CopyId(2), CopyId(3)]
    assert shown == ("off", REASON)
    assert node.take() == [("deep", is_on), ("shallow", is_on)]
    assert _shown(entry) == ("ready", "")


async def test_mover_that_starts_does_not_hang(node: Node) -> None:
    """A mover that is starting does not count as hanging, and copies wait for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        node.tiers.mover_came("mover", theirs, 1)
        _send(node, node.registry.cache("shallow"), 1, Direction.RELOAD)

        node.tiers.tick(asyncio.get_running_loop().time() + 8)

        assert node.take() == []


async def test_nobody_waits_for_a_mover_that_never_says_a_word(node: Node) -> None:
    """A mover that freezes at its start holds callers up neither for all of its start time nor again and again."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    entry = node.registry.cache("shallow")
    with ours:
        node.tiers.mover_came("mover", theirs, 1)
        _send(node, entry, 1, Direction.RELOAD)
        now = asyncio.get_running_loop().time()

        node.tiers.tick(now + 12)
        off, shown = node.take(), _shown(entry)
        node.tiers.tick(now + 13)
        still_off = node.take()
        ours.send(protocol.HERE)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        node.tiers.tick(asyncio.get_running_loop().time())

    assert [command.copy_id for _, command in off if isinstance(command, c.CopyFailed)] == [
        CopyId(1)
    ]
    assert ("shallow", c.TierChanged(tier=Tier.HOST, is_on=False)) in off
    reason = "its mover was started 10 s ago and has not reported anything yet; after 60 s it will be replaced"
    assert (shown, still_off) == (("off", reason), [])
    assert ("shallow", c.TierChanged(tier=Tier.HOST, is_on=True)) in node.take()
    assert _shown(entry) == ("ready", "")


async def test_mover_that_was_given_up_is_not_said_to_answer(
    node: Node, ends: dict[str, socket.socket], capsys: pytest.CaptureFixture[str]
) -> None:
    """If a hanging mover is replaced, the hang ends without a log line that the mover answered."""
    assert ends
    _send(node, node.registry.cache("shallow"), 1, Direction.RELOAD)
    now = asyncio.get_running_loop().time()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        node.tiers.tick(now + 4)
        node.tiers.mover_came("mover", theirs, 2)
        node.tiers.tick(now + 5)

    said = "".join(capsys.readouterr())
    assert "mover_hangs" in said
    assert "mover_answers" not in said


async def test_cache_that_comes_while_the_mover_hangs_is_told(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """A cache registered while the mover hangs has its host pool off; one without a host pool is told nothing."""
    assert ends
    _send(node, node.registry.cache("shallow"), 1, Direction.RELOAD)
    node.tiers.tick(asyncio.get_running_loop().time() + 4)
    node.take()

    for name, host_bytes in (("late", 1 << 20), ("flat", 0)):
        node.tiers.introduce(cache_of(node.registry, name, host_bytes=host_bytes))

    assert node.take() == [("late", c.TierChanged(tier=Tier.HOST, is_on=False))]


def _send(node: Node, entry: CacheEntry, number: int, direction: Direction) -> None:
    ids = np.zeros(1, np.int32).tobytes()
    copy = Copy(
        copy_id=CopyId(number),
        direction=direction,
        source_ids=ids,
        target_ids=ids,
        checksums=b"",
    )
    node.tiers.send(entry, copy)


def _shown(entry: CacheEntry) -> tuple[str, str]:
    (host,) = [one for one in entry.tiers() if one.tier == Tier.HOST.value]
    return host.status, host.reason
