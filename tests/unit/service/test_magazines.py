"""Magazines in the daemon: who may share one, what a call may carry, and what is kept over lives."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest

from kvlease.errors import IdReusedError, InvalidError, TooLargeError, WrongStateError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.verbs.picturing import Gallery, PoolName

from .conftest import OPERATOR, Node, keys


async def attach(node: Node, *, pid: int | None = None, **changes: str) -> Caller:
    """Attach a worker whose death can be proven, and return it as a caller."""
    peer = Caller(transport="local", peer_pid=os.getpid() if pid is None else pid)
    request = pb.AttachRequest(cache="main", **changes)  # type: ignore[arg-type]
    reply = await node.ask("attach", request, peer)
    return Caller(transport="local", token=reply.token)


@asynccontextmanager
async def registered(node: Node) -> AsyncIterator[None]:
    """Run a daemon that has the cache."""
    async with node.life():
        await node.register()
        yield


async def test_magazine_is_kept_over_the_lives_of_the_daemon(node: Node) -> None:
    """Blocks, keys and sequence outlive the daemon, and a retry of the next exchange gets the same answer."""
    async with registered(node):
        worker = await attach(node, magazine="one")
        take = pb.ExchangeRequest(take_running=2, sequence=1)
        taken = await node.ask("exchange", take, worker)
        publish = pb.ExchangeRequest(
            publish_blocks=taken.taken_blocks[:4], publish_keys=keys(1, 1), sequence=2
        )
        assert (await node.ask("exchange", publish, worker)).published == b"\1"

    async with node.life():
        told = await node.ask("inventory", pb.InventoryRequest(), worker)
        assert (told.blocks, told.sequence) == (taken.taken_blocks, 2)
        assert told.keys == keys(1, 1) + bytes(32)
        with pytest.raises(IdReusedError):
            await node.ask("exchange", publish, worker)
        metrics = node.daemon.registry.cache("main").core.census().magazines
        assert metrics == ((0, 1, 1),)


async def test_retry_with_the_same_key_is_answered_as_before(node: Node) -> None:
    """Within a life, a retry of an exchange gets the answer of the first try, and takes nothing more."""
    async with registered(node):
        worker = await attach(node, magazine="one")
        keyed = Caller(transport="local", token=worker.token, idempotency_key="k")
        take = pb.ExchangeRequest(take_new=3, sequence=1)

        first = await node.ask("exchange", take, keyed)
        again = await node.ask("exchange", take, keyed)

        assert first == again
        assert len(np.frombuffer(first.taken_blocks, np.int32)) == 3


async def test_magazine_needs_a_proof_of_death(node: Node) -> None:
    """A worker whose death cannot be proven gets no magazine, and the refused attach leaves no worker."""
    async with registered(node):
        with pytest.raises(WrongStateError, match="death"):
            await node.attach(magazine="one")

        assert node.daemon.registry.cache("main").num_workers == 0


@pytest.mark.parametrize("name", ["m" * 129, "a\nb"], ids=["long", "unprintable"])
async def test_name_of_a_magazine_is_checked(node: Node, name: str) -> None:
    """A magazine's name has up to 128 printable characters."""
    async with registered(node):
        with pytest.raises(InvalidError, match="magazine"):
            await attach(node, magazine=name)


async def test_magazine_of_a_worker_does_not_change(node: Node) -> None:
    """A worker that attaches again keeps its magazine, and cannot move to another."""
    async with registered(node):
        worker = await attach(node, magazine="one")

        for magazine in ("", "one"):
            await attach(node, resume_token=worker.token, magazine=magazine)
        with pytest.raises(InvalidError, match="magazine differs"):
            await attach(node, resume_token=worker.token, magazine="two")


async def test_tenants_with_the_same_name_have_magazines_of_their_own(node: Node) -> None:
    """A magazine's name counts within its tenant only."""
    async with registered(node):
        ours = await attach(node, magazine="one")
        theirs = await attach(node, magazine="one", tenant="other")
        await node.ask("exchange", pb.ExchangeRequest(take_new=2, sequence=1), ours)

        assert (await node.ask("inventory", pb.InventoryRequest(), theirs)).sequence == 0


@pytest.mark.parametrize("field", ["publish_blocks", "retract_blocks", "drop_blocks", "hold_keys"])
async def test_columns_are_bounded(node: Node, field: str) -> None:
    """Each column of an exchange has a limit on its entries."""
    async with registered(node):
        worker = await attach(node, magazine="one")
        num_bytes = (node.settings.max_blocks_a_call + 1) * (32 if field == "hold_keys" else 4)
        request = pb.ExchangeRequest(**{field: bytes(num_bytes)}, sequence=1)  # type: ignore[arg-type]

        with pytest.raises(TooLargeError, match=field):
            await node.ask("exchange", request, worker)


async def test_magazine_has_one_number_wherever_it_is_told(node: Node) -> None:
    """The page, a block of the page and the list of magazines show the same number for a magazine."""
    async with registered(node):
        worker = await attach(node, magazine="one")
        taken = await node.ask("exchange", pb.ExchangeRequest(take_running=1, sequence=1), worker)
        block = int(np.frombuffer(taken.taken_blocks, np.int32)[0])
        shown = Gallery(node.daemon.registry, epoch=7, codes=dict, movers=dict)

        asked = pb.InspectRequest(cache="main", what="magazines")
        listed = await node.ask("inspect", asked, OPERATOR)
        (cache,) = cast("list[dict[str, Any]]", shown.sheet()["caches"])

    (one,) = listed.magazines
    assert [told["magazine_id"] for told in cache["magazines"]] == [one.magazine_id]
    assert shown.block(PoolName("main", "device"), block)["magazines"] == (one.magazine_id,)
