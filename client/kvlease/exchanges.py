"""Own the records of an exchange of a magazine: what it is to do, and what it did; the fields are the protocol's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


def packable(numbers: Sequence[int], dtype: type[np.int32] | type[np.uint32]) -> ArrayLike:
    """Return a column of an order in the form that is packed fastest; most columns are empty and need no array."""
    return np.array(numbers, dtype) if numbers else ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangeOrder:
    """What one exchange of a magazine does, in the order of the fields; a field that is left out changes nothing."""

    publish_blocks: ArrayLike = ()
    """Private blocks whose bytes are written: they become findable, and stay in the magazine."""
    publish_keys: bytes = b""
    """A 32-byte key for each published block."""
    publish_positions: ArrayLike = ()
    """The index of each published block in its request's chain; empty if the indexes are unknown."""
    retract_blocks: ArrayLike = ()
    """Findable blocks that are to be overwritten: they become private."""
    drop_blocks: ArrayLike = ()
    """Blocks that leave the magazine, in token order."""
    hold_keys: bytes = b""
    """32-byte keys of blocks that the magazine is to hold."""
    stops_at_miss: bool = False
    """Whether holding stops at the first key that is not on the device."""
    brings: bool = False
    """Whether blocks that only a lower tier has are brought to the device, where a later exchange finds them."""
    holds_all: bool = False
    """Whether to hold every findable block of the tenant; refused while another magazine has blocks."""
    take_running: int = 0
    """Blocks wanted for requests that run."""
    take_new: int = 0
    """Blocks wanted to admit new requests."""
    all_or_nothing: bool = False
    """Whether `take_running` and `take_new` each give either all blocks wanted or none."""
    missed_keys: bytes = b""
    """32-byte keys that the engine looked for without asking the daemon, as they were surely absent: to be counted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchanged:
    """What an exchange did; the first three fields have a number for each entry of the order: 1 if it was done."""

    published: NDArray[np.uint8]
    """1: done; 2: another block has the key, and this one stays private; 3: not a private block of the magazine."""
    retracted: NDArray[np.uint8]
    """1: done; 2: others hold the block, too; 3: not a findable block of the magazine."""
    dropped: NDArray[np.uint8]
    """1: done; 3: the block was not in the magazine."""
    held: NDArray[np.int32]
    """Each key's block, now in the magazine; -1: cached nowhere; -2: cached but not held, as it is in a lower tier or
    behind a block that is."""
    held_all_blocks: NDArray[np.int32]
    held_all_keys: bytes
    taken_running: NDArray[np.int32]
    taken_new: NDArray[np.int32]
    num_available: int
    """Blocks that could be taken now: free blocks, and cached ones that nobody holds."""
    num_magazines: int
    """Magazines that have or want blocks of the cache, this one among them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inventory:
    """What is in a magazine at one instant."""

    blocks: NDArray[np.int32]
    """The block ids, ascending."""
    keys: bytes
    """A 32-byte key for each block; zeros for a private block."""
    sequence: int
    """The sequence of the last exchange that was carried out."""
