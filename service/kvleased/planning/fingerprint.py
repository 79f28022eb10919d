"""Own the digest of all that decides where a byte of a block lies and what it means, but not of the number of blocks.

The places are those in a pool of one block: with layers outermost, offsets grow with the pool, but the order of a
block's bytes in a slot stays the same.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from blake3 import blake3

from kvlease.layout import Layout
from kvlease.plan import LayerPlacement
from kvlease.spec import spec_to_fields

_VERSION: Final = 2
_NUMBERS: Final = (
    "name",
    "group",
    "offset_bytes",
    "block_stride_bytes",
    "bytes_per_page",
    "head_stride_bytes",
    "state_stride_bytes",
)


def fingerprint(
    *,
    layout: Layout,
    places: Sequence[Sequence[LayerPlacement]],
    place_of_rank: Sequence[int],
    slots: Mapping[str, object],
    context_ranks: int,
) -> str:
    """Return the hex digest of the layout, of the ranks' places in a pool of one block, and of the slots.

    The number of context ranks counts, too: ranks may have the same places whether they share a block's tokens or not.
    """
    content: dict[str, object] = {
        "version": _VERSION,
        "layout": layout.value,
        "slots": slots,
        "place_of_rank": tuple(place_of_rank),
        "places": [[_described(layer) for layer in layers] for layers in places],
    }
    if context_ranks > 1:
        content["context_ranks"] = context_ranks
    return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _described(layer: LayerPlacement) -> dict[str, Any]:
    """Return the numbers of a place and what is kept there, but not the backend that reads it, which moves no byte."""
    spec = spec_to_fields(layer.spec)
    spec.pop("backend", None)
    return {"spec": spec} | {name: getattr(layer, name) for name in _NUMBERS}
