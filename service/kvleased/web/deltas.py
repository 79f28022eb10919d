"""Own how pictures are sent and packed: whole, or as the cells that differ from the picture before."""

import json
from base64 import b64encode
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.views.picture import LOOKS
from kvleased.verbs.picturing import PoolName, Shown

_WHOLE_FROM: Final = 4
"""If more than one cell in so many differs, the picture is sent whole, which is shorter then."""

Sheet = dict[str, object]


def head(name: PoolName, shown: Shown) -> Sheet:
    """Return the description of a picture: its pool, blocks, cells and tenants."""
    picture = shown.picture
    return {
        "cache": name.cache,
        "tier": name.tier,
        "first_block": picture.first_block,
        "num_blocks": picture.num_blocks,
        "blocks_per_cell": picture.blocks_per_cell,
        "num_cells": len(picture.looks),
        "tenants": list(shown.tenants),
    }


def packed(name: PoolName, shown: Shown) -> bytes:
    """Return a picture as a line of JSON, then a byte for the look of each cell, then one for its tenant."""
    sheet = head(name, shown) | {"looks": list(LOOKS)}
    picture = shown.picture
    return json.dumps(sheet).encode() + b"\n" + picture.looks.tobytes() + picture.tenants.tobytes()


def change(name: PoolName, shown: Shown, before: Shown | None) -> Sheet | None:
    """Return what to send to a viewer who has the picture `before`; None if nothing has changed."""
    if before is shown:
        return None
    whole = head(name, shown)
    picture = shown.picture
    if before is None or whole != head(name, before):
        return whole | _planes(picture.looks, picture.tenants)
    differs = picture.looks != before.picture.looks
    differs |= picture.tenants != before.picture.tenants
    (cells,) = differs.nonzero()
    if not len(cells):
        return None
    if len(cells) * _WHOLE_FROM > len(differs):
        return whole | _planes(picture.looks, picture.tenants)
    at = b64encode(cells.astype("<u4").tobytes()).decode()
    part = {"cache": name.cache, "tier": name.tier, "at": at}
    return part | _planes(picture.looks[cells], picture.tenants[cells])


def _planes(looks: NDArray[np.uint8], tenants: NDArray[np.uint8]) -> Sheet:
    return {
        "looks": b64encode(looks.tobytes()).decode(),
        "owners": b64encode(tenants.tobytes()).decode(),
    }
