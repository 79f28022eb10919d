"""Own the identifiers that both ends use; nobody does arithmetic on them.

Ids of leases, workers, pins and copies start above `epoch << 20` in every life of the daemon, and are counted across
all its caches. So no id is ever issued twice for one kind of thing, not even after a restart or in another cache. All
ids stay below 2**53, so JSON carries them exactly.
"""

from typing import Final, NewType

BlockId = NewType("BlockId", int)
"""The index of a block in its cache's device pool."""

SlotId = NewType("SlotId", int)
"""The index of a slot in its cache's host pool."""

GroupId = NewType("GroupId", int)
"""The index of a group of layers that share a table."""

LeaseId = NewType("LeaseId", int)
"""A right to blocks; never issued twice."""

WorkerId = NewType("WorkerId", int)
"""One attachment of one process to one cache; never issued twice."""

PinId = NewType("PinId", int)
"""A named hold on cached blocks; never issued twice."""

CopyId = NewType("CopyId", int)
"""One batch of copies that a mover carries out."""

Epoch = NewType("Epoch", int)
"""One life of the daemon; grows with every start."""

BlockKey = NewType("BlockKey", bytes)
"""The 32-byte name of a block's content."""

BYTES_PER_KEY: Final = 32
"""Bytes of one block key."""

CACHE_CHARACTERS_MAX: Final = 63
"""Characters of the longest name of a cache."""

TENANT_CHARACTERS_MAX: Final = 128
"""Characters of the longest name of a tenant."""

ID_MAX: Final = 2**63 - 1
"""The largest number that the protocol carries as an id; no issued id comes near it."""

SEQUENCE_MAX: Final = 2**53 - 1
"""The largest number that an event may have; JSON carries it exactly."""

EPOCH_SHIFT: Final = 20
"""Bits below the epoch in an id, for the ids of one life of the daemon."""
