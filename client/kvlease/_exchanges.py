"""Own how an exchange becomes a request and what its answer means; when one may be sent is `magazine`'s business."""

from typing import Final

import numpy as np

from kvlease._calls import Ask, ask
from kvlease._fields import packed
from kvlease.exchanges import Exchanged, ExchangeOrder, Inventory
from kvlease.v1 import kvlease_pb2 as pb

_INT32: Final = np.dtype("<i4")
_UINT32: Final = np.dtype("<u4")


def exchange(order: ExchangeOrder, sequence: int) -> Ask[Exchanged]:
    """Ask for a magazine to be changed."""
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
        ),
        _exchanged,
    )


def inventory() -> Ask[Inventory]:
    """Ask what is in a magazine."""
    return ask("inventory", pb.InventoryRequest, _inventory)


def _exchanged(reply: pb.ExchangeResponse) -> Exchanged:
    taken = np.frombuffer(reply.taken_blocks, _INT32)
    return Exchanged(
        published=np.frombuffer(reply.published, np.uint8),
        retracted=np.frombuffer(reply.retracted, np.uint8),
        dropped=np.frombuffer(reply.dropped, np.uint8),
        held=np.frombuffer(reply.held_blocks, _INT32),
        held_all_blocks=np.frombuffer(reply.held_all_blocks, _INT32),
        held_all_keys=reply.held_all_keys,
        taken_running=taken[: reply.num_taken_running],
        taken_new=taken[reply.num_taken_running :],
        num_available=reply.num_available,
        num_magazines=reply.num_magazines,
    )


def _inventory(reply: pb.InventoryResponse) -> Inventory:
    return Inventory(
        blocks=np.frombuffer(reply.blocks, _INT32), keys=reply.keys, sequence=reply.sequence
    )
