"""Build caches with lower tiers, fill those tiers, and give the stores' answers, for the laws of tiers."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvlease.ids import BYTES_PER_KEY
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Adopted, Copy, Direction, Found, Outcome, Probe, Tier
from kvleased.core.tier.labels import LABEL, pack_labels
from tests.unit.service.core.builders import (
    TENANT,
    WAIT_MS,
    a_cache,
    a_reserve,
    answer,
    cached,
    copies,
    keys,
    land,
)

NUM_DISK_SLOTS: Final = 16


def a_tiered_cache(num_blocks: int = 8, num_slots: int = 8, **numbers: Any) -> Cache:
    """Return a cache with a disk store below its host pool."""
    numbers.setdefault("num_disk_slots", NUM_DISK_SLOTS)
    return a_cache(num_blocks, num_slots, **numbers)


def a_remote_cache(num_blocks: int = 8, num_slots: int = 8, **numbers: Any) -> Cache:
    """Return a cache with a remote store below its host pool."""
    return a_cache(num_blocks, num_slots, uses_remote=True, **numbers)


def labels_of(packed: bytes, tenant: int = TENANT, generation: int = 0) -> bytes:
    """Return the labels of the blocks of a chain."""
    return pack_labels(packed, tenant, np.arange(len(packed) // BYTES_PER_KEY), generation)


def label_keys(packed: bytes) -> bytes:
    """Return the keys in packed labels."""
    return np.frombuffer(packed, LABEL)["key"].tobytes()


def label_numbers(packed: bytes, name: str) -> list[int]:
    """Return the numbers of one name in packed labels."""
    return [int(one) for one in np.frombuffer(packed, LABEL)[name]]


def adopt(
    cache: Cache, slots: Sequence[int], labels: bytes, checksums: Sequence[int] | None = None
) -> int:
    """Let the store report what it found in its slots, and return how many of the slots are taken over."""
    sums = [0] * len(slots) if checksums is None else checksums
    command = c.Adopt(
        slot_ids=np.array(slots, np.int32).tobytes(),
        labels=labels,
        checksums=np.array(sums, np.uint64).tobytes(),
    )
    return answer(cache.handle(command, 0.0), Adopted).num_adopted


def on_disk(cache: Cache, packed: bytes, tenant: int = TENANT, first_slot: int = 0) -> None:
    """Put blocks of keys in the disk store and in no other tier."""
    slots = range(first_slot, first_slot + len(packed) // BYTES_PER_KEY)
    adopt(cache, slots, labels_of(packed, tenant))


def dirty_slots(cache: Cache, packed: bytes) -> Outcome:
    """Bring blocks of keys to the host pool, and return what that starts."""
    cached(cache, packed)
    (copy,) = [
        one
        for one in copies(cache.handle(c.Evict(keys=packed), 0.0))
        if one.direction is Direction.OFFLOAD
    ]
    return land(cache, copy)


def a_patient_reserve(packed: bytes, request_id: str = "r", *, more: int = 0) -> c.Reserve:
    """Return the command of a reserve that may wait, for the blocks of a prefix and some more."""
    num_blocks = len(packed) // BYTES_PER_KEY + more
    return a_reserve(num_blocks, request_id, packed, wait_ms=WAIT_MS)


def the_copies(outcome: Outcome) -> dict[Direction, Copy]:
    """Return the copies that an outcome starts; no two of them have the same direction."""
    found = {copy.direction: copy for copy in copies(outcome)}
    assert len(found) == len(copies(outcome))
    return found


def probes(outcome: Outcome) -> list[Probe]:
    """Return the questions that an outcome asks the remote store."""
    return [effect for effect in outcome.effects if isinstance(effect, Probe)]


def the_probe(outcome: Outcome) -> Probe:
    """Return the only question of an outcome."""
    (probe,) = probes(outcome)
    return probe


def probed(cache: Cache, probe: Probe, *present: int, now: float = 0.0) -> Outcome:
    """Let the remote store answer with a number for each block, 0 for a block that it does not have."""
    return cache.handle(c.Probed(probe_id=probe.probe_id, is_present=bytes(present)), now)


def turn(cache: Cache, tier: Tier, *, on: bool) -> Outcome:
    """Turn a store on or off."""
    return cache.handle(c.TierChanged(tier=tier, is_on=on), 0.0)


def looked_up(cache: Cache, packed: bytes, tenant: int | None = TENANT) -> tuple[int, int, int]:
    """Return how many blocks of a prefix are on the device, in the host pool and on disk."""
    reply = answer(cache.handle(c.Lookup(keys=packed, tenant_digest=tenant), 0.0), Found)
    return reply.num_device_blocks, reply.num_host_blocks, reply.num_disk_blocks


def doc(num_blocks: int, first: int = 1) -> bytes:
    """Return the keys of a document."""
    return keys(*range(first, first + num_blocks))
