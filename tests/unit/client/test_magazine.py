"""Laws of magazines as engines see them: what an answer says, and that nothing is carried out twice."""

import asyncio
from typing import Any

import numpy as np
import pytest

from kvlease.errors import (
    DeadlineError,
    IdReusedError,
    InvalidError,
    KVLeaseError,
    StaleEpochError,
    UnavailableError,
    WrongStateError,
)
from kvlease.exchanges import Exchanged, ExchangeOrder, Inventory
from kvlease.magazine import AsyncMagazine, Magazine
from kvlease.transports.base import Attached
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.played import Clock, Played, attached, ids, session_of

STOCK = pb.InventoryResponse(blocks=ids(3, 5), keys=bytes(32) + b"k" * 32, sequence=6)
DONE = pb.ExchangeResponse(
    published=b"\1\2",
    retracted=b"\3",
    dropped=b"\1",
    held_blocks=ids(4, -2),
    held_all_blocks=ids(4),
    held_all_keys=b"k" * 32,
    taken_blocks=ids(7, 8, 9),
    num_taken_running=2,
    num_available=11,
    num_magazines=3,
)


def magazine(*script: Any) -> tuple[Magazine, Played]:
    """Return a magazine whose calls are answered by a script."""
    clock = Clock()
    session = session_of(clock, raises=False)
    session.request.magazine = "engine"
    played = Played(session, clock, *script)
    return Magazine(session, played), played  # type: ignore[arg-type]


def sequences(played: Played) -> list[int]:
    """Return the sequences of the exchanges that were sent."""
    return [
        call.request.sequence
        for call in played.sent
        if isinstance(call.request, pb.ExchangeRequest)
    ]


def test_exchange_says_what_became_of_each_entry() -> None:
    """An answer's columns are arrays, and taken blocks are separated by what they are wanted for."""
    mine, _played = magazine(STOCK, DONE)

    told = mine.exchange(ExchangeOrder(publish_blocks=[1, 2], publish_keys=bytes(64)))

    assert isinstance(told, Exchanged)
    arrays = (told.published, told.retracted, told.dropped, told.held, told.held_all_blocks)
    assert [one.tolist() for one in arrays] == [[1, 2], [3], [1], [4, -2], [4]]
    assert (told.taken_running.tolist(), told.taken_new.tolist()) == ([7, 8], [9])
    assert (told.held_all_keys, told.num_available, told.num_magazines) == (b"k" * 32, 11, 3)


def test_order_is_sent_as_it_is() -> None:
    """Every field of an order goes into the call, with the next sequence and an idempotency key."""
    mine, played = magazine(STOCK, DONE)
    order = ExchangeOrder(
        publish_blocks=np.array([1], np.int32),
        publish_keys=bytes(32),
        publish_positions=[4],
        retract_blocks=[2],
        drop_blocks=[3],
        hold_keys=bytes(32),
        stops_at_miss=True,
        brings=True,
        holds_all=True,
        take_running=5,
        take_new=6,
        all_or_nothing=True,
    )

    mine.exchange(order)

    assert played.sent[-1].idempotency_key
    assert played.sent[-1].request == pb.ExchangeRequest(
        publish_blocks=ids(1),
        publish_keys=bytes(32),
        publish_positions=ids(4),
        retract_blocks=ids(2),
        drop_blocks=ids(3),
        hold_keys=bytes(32),
        stops_at_miss=True,
        brings=True,
        holds_all=True,
        take_running=5,
        take_new=6,
        all_or_nothing=True,
        sequence=7,
    )


def test_exchanges_follow_each_other() -> None:
    """The first exchange goes on from the inventory, and each later one from the exchange before it."""
    mine, played = magazine(STOCK, DONE)

    mine.exchange()
    mine.exchange()

    assert sequences(played) == [7, 8]
    assert repr(mine) == "<Magazine 'engine', after 8 exchanges>"


def test_inventory_is_the_truth() -> None:
    """Blocks come with their keys, and the next exchange goes on from the inventory's sequence."""
    mine, played = magazine(STOCK, DONE)

    found = mine.inventory()
    mine.exchange()

    assert isinstance(found, Inventory)
    assert (found.blocks.tolist(), found.keys, found.sequence) == ([3, 5], STOCK.keys, 6)
    assert sequences(played) == [7]


@pytest.mark.parametrize(
    "error", [DeadlineError(), IdReusedError("stale")], ids=["no answer", "stale"]
)
def test_inventory_comes_first_after_a_lost_answer(error: KVLeaseError) -> None:
    """After a call with an unknown outcome, nothing is exchanged before an inventory shows the outcome."""
    mine, played = magazine(STOCK, error, pb.InventoryResponse(sequence=7), DONE)

    with pytest.raises(type(error)):
        mine.exchange()
    with pytest.raises(WrongStateError, match="inventory"):
        mine.exchange()
    assert repr(mine) == "<Magazine 'engine', in doubt>"
    mine.inventory()
    mine.exchange()

    assert sequences(played) == [7, 8]


def test_refused_exchange_leaves_no_doubt() -> None:
    """A refused exchange was not carried out, so the next exchange has its sequence."""
    mine, played = magazine(STOCK, WrongStateError(), DONE)

    with pytest.raises(WrongStateError):
        mine.exchange(ExchangeOrder(holds_all=True))
    mine.exchange()

    assert sequences(played) == [7, 7]


def test_malformed_order_is_not_sent() -> None:
    """Numbers that no block has are refused before anything is sent, and leave no doubt."""
    mine, played = magazine(STOCK, DONE)

    with pytest.raises(InvalidError):
        mine.exchange(ExchangeOrder(drop_blocks=[2**40]))
    mine.exchange()

    assert sequences(played) == [7]


@pytest.mark.parametrize("order", [None, {}, [1]])
def test_what_is_no_order_is_refused(order: Any) -> None:
    """An exchange of anything but an order is refused by name, and leaves no doubt."""
    mine, played = magazine(STOCK, DONE)

    with pytest.raises(InvalidError, match=r"^order must be a ExchangeOrder"):
        mine.exchange(order)
    mine.exchange()

    assert sequences(played) == [7]


def test_lost_answer_is_asked_for_again_under_the_same_sequence() -> None:
    """A retry after a broken connection or a restart is the same exchange, so it is carried out only once."""
    again = Attached(attached(epoch=2), [])
    mine, played = magazine(STOCK, UnavailableError(), StaleEpochError(), again, DONE)

    mine.exchange()

    assert sequences(played) == [7, 7, 7]
    assert len({call.idempotency_key for call in played.sent[1:]}) == 1
    assert [one.magazine for one in played.attaches] == ["engine"]


@pytest.mark.parametrize("kind", [Magazine, AsyncMagazine])
def test_worker_without_a_magazine_has_none(kind: type[Magazine | AsyncMagazine]) -> None:
    """A worker that attached without a magazine's name is told so."""
    session = session_of(Clock(), raises=False)

    with pytest.raises(WrongStateError, match="magazine"):
        kind(session, None)  # type: ignore[arg-type]


def test_magazine_of_an_event_loop_says_the_same() -> None:
    """The asynchronous magazine sends the same calls."""
    _, played = magazine(STOCK, DONE)

    class Port:
        """A port that carries out flows as a script says."""

        async def run(self, flow: Any) -> Any:
            """Carry out a flow."""
            return played.run(flow)

    async def play() -> tuple[Exchanged, Inventory]:
        mine = AsyncMagazine(played.session, Port())  # type: ignore[arg-type]
        told = await mine.exchange()
        played.script = [STOCK]
        return told, await mine.inventory()

    told, found = asyncio.run(play())

    assert (told.num_available, found.sequence) == (11, 6)
