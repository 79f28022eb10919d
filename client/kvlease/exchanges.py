"""Own what an exchange of a magazine is asked to do and what it did; the fields are those of the protocol."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


def packable(numbers: Sequence[int], dtype: type[np.int32] | type[np.uint32]) -> ArrayLike:
    """Return a column of an order as it is packed fastest; none at all, as most are, needs no array."""
    return np.array(numbers, dtype) if numbers else ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangeOrder:
    """What one exchange of a magazine does, in the order of the fields; what is left out changes nothing."""

    publish_blocks: ArrayLike = ()
    """Private blocks whose bytes are written: they become findable, and stay in the magazine."""
    publish_keys: bytes = b""
    """32 bytes for each."""
    publish_positions: ArrayLike = ()
    """The index of each in its request's chain; empty where nobody knows."""
    retract_blocks: ArrayLike = ()
    """Findable blocks that are to be overwritten: they become private."""
    drop_blocks: ArrayLike = ()
    """Blocks that leave the magazine, in token order."""
    hold_keys: bytes = b""
    """32-byte keys of blocks that the magazine is to hold."""
    stops_at_miss: bool = False
    """Whether holding stops at the first key that is not on the device."""
    brings: bool = False
    """Whether what only a lower tier has is brought to the device, where a later exchange finds it."""
    holds_all: bool = False
    """Whether every findable block of the tenant is held; only where no other magazine has any."""
    take_running: int = 0
    """Blocks wanted for requests that run."""
    take_new: int = 0
    """Blocks wanted to admit new requests."""
    all_or_nothing: bool = False
    """Whether fewer blocks than were wanted are none at all, of each of the two."""
    missed_keys: bytes = b""
    """32-byte keys that were sought and that nobody was asked for, as they were surely absent: told to be counted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchanged:
    """What an exchange did; the first three have a number for each entry of the order, 1 where it was done."""

    published: NDArray[np.uint8]
    """2: another block has the key, and this one stays private; 3: not a private block of the magazine."""
    retracted: NDArray[np.uint8]
    """2: others hold the block, too; 3: not a findable block of the magazine."""
    dropped: NDArray[np.uint8]
    """3: it was not in the magazine."""
    held: NDArray[np.int32]
    """For each key its block, in the magazine now; -1: nowhere; -2: cached, but not held: below, or behind such."""
    held_all_blocks: NDArray[np.int32]
    held_all_keys: bytes
    taken_running: NDArray[np.int32]
    taken_new: NDArray[np.int32]
    num_available: int
    """Blocks that could be taken now: free ones, and cached ones that nobody holds."""
    num_magazines: int
    """Magazines that have or want blocks of the cache, this one among them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inventory:
    """What is in a magazine at one instant."""

    blocks: NDArray[np.int32]
    """Ascending."""
    keys: bytes
    """32 bytes for each; zeros for a private block."""
    sequence: int
    """Of the last exchange that was carried out."""
