"""Own how an exchange becomes a request and what its answer means; when to send one is `magazine`'s business."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease._calling.calls import Ask, ask
from kvlease._calling.fields import packed
from kvlease._checks import check_type
from kvlease.exchanges import Exchanged, ExchangeOrder, Inventory
from kvlease.v1 import kvlease_pb2 as pb

_INT32: Final = np.dtype("<i4")
_UINT32: Final = np.dtype("<u4")
_NO_CODES: Final = np.frombuffer(b"", np.uint8)
_NO_NUMBERS: Final = np.frombuffer(b"", _INT32)


def exchange(order: ExchangeOrder, sequence: int) -> Ask[Exchanged]:
    """Ask for a magazine to be changed."""
    check_type("order", order, ExchangeOrder)
    return ask(
        "exchange",
        lambda: pb.ExchangeRequest(
            publish_blocks=packed(order.publish_blocks, _INT32),
            publish_keys=order.publish_keys,
            publish_positions=packed(order.publish_positions, _UINT32),
            retract_blocks=packed(order.retract_blocks, _INT32),
            drop_blocks=packed(order.drop_blocks, _INT32),
            hold_keys=order.hold_keys,
            stops_at_miss=order.stops_at_miss,
            brings=order.brings,
            holds_all=order.holds_all,
            take_running=order.take_running,
            take_new=order.take_new,
            all_or_nothing=order.all_or_nothing,
            sequence=sequence,
            missed_keys=order.missed_keys,
        ),
        _exchanged,
    )


def inventory() -> Ask[Inventory]:
    """Ask what is in a magazine."""
    return ask("inventory", pb.InventoryRequest, _inventory)


def _exchanged(reply: pb.ExchangeResponse) -> Exchanged:
    taken = _numbers(reply.taken_blocks)
    return Exchanged(
        published=_codes(reply.published),
        retracted=_codes(reply.retracted),
        dropped=_codes(reply.dropped),
        held=_numbers(reply.held_blocks),
        held_all_blocks=_numbers(reply.held_all_blocks),
        held_all_keys=reply.held_all_keys,
        taken_running=taken[: reply.num_taken_running],
        taken_new=taken[reply.num_taken_running :],
        num_available=reply.num_available,
        num_magazines=reply.num_magazines,
    )


def _codes(told: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(told, np.uint8) if told else _NO_CODES


def _numbers(told: bytes) -> NDArray[np.int32]:
    return np.frombuffer(told, _INT32) if told else _NO_NUMBERS


def _inventory(reply: pb.InventoryResponse) -> Inventory:
    return Inventory(
        blocks=np.frombuffer(reply.blocks, _INT32), keys=reply.keys, sequence=reply.sequence
    )
