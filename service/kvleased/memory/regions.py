"""Own which memory regions a cache has and how large each is; other modules make, keep and map them."""

import os
from collections.abc import Mapping
from typing import Final

from blake3 import blake3

from kvlease.plan import CachePlan
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.config.settings import MIB
from kvleased.core.shape import CacheShape
from kvleased.memory.host_files import HostSizes
from kvleased.memory.records import (
    host_records_layout,
    magazines_layout,
    records_layout,
    table_layout,
)

PLAN: Final = "plan"
"""The region that holds the plan; it is made last and dropped first, so it vouches for the others."""
HOST: Final = "host"
HOST_RECORDS: Final = "host_records"
RECORDS: Final = "records"
TABLES: Final = "tables"
MAGAZINES: Final = "magazines"

_DEVICE_PREFIX: Final = "device."
_DENSE_TABLES_BYTES_MAX: Final = 64 * MIB
"""Block tables up to this size are populated, too; larger ones are sparse, because a lease touches only its own row."""


def device_kind(rank: int) -> str:
    """Return the name of a rank's device region among the regions of its cache."""
    return f"{_DEVICE_PREFIX}{rank}"


def is_device(kind: str) -> bool:
    """Tell whether a region is the device region of a rank."""
    return kind.startswith(_DEVICE_PREFIX)


def region_sizes(plan: CachePlan, shape: CacheShape) -> dict[str, int]:
    """Return the bytes of every region of a cache except the plan's, in the order in which they are made."""
    sizes = {
        RECORDS: records_layout(shape).region_bytes,
        TABLES: table_layout(shape).region_bytes,
        MAGAZINES: magazines_layout(shape).region_bytes,
    }
    if plan.host_bytes:
        sizes |= {
            HOST_RECORDS: host_records_layout(shape).region_bytes,
            HOST: plan.host_bytes,
        }
    return sizes | {device_kind(rank.rank): rank.device_bytes for rank in plan.ranks}


def sizes_to_populate(plan: CachePlan, shape: CacheShape) -> dict[str, int]:
    """Return the bytes of every region that must be populated before the cache is ready, in the order of populating."""
    sizes = region_sizes(plan, shape)
    if sizes[TABLES] > _DENSE_TABLES_BYTES_MAX:
        del sizes[TABLES]
    sizes |= {HOST: sizes.pop(HOST)} if HOST in sizes else {}
    return {kind: num_bytes for kind, num_bytes in sizes.items() if num_bytes}


def pool_kinds(plan: CachePlan) -> list[str]:
    """Return the regions that blocks lie in, as a mover expects them: each rank's device region, then the host's."""
    kinds = [device_kind(rank.rank) for rank in plan.ranks]
    return [*kinds, HOST] if plan.host_bytes else kinds


def host_sizes(plan: CachePlan, shape: CacheShape) -> HostSizes:
    """Return the bytes of the files that outlive the container, if there is a directory for them."""
    records_bytes = host_records_layout(shape).region_bytes
    return HostSizes(slots_bytes=plan.host_bytes, records_bytes=records_bytes)


def are_whole(fds: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    """Tell whether every region is there and as long as it was made: reading beyond a file's end ends the process."""
    return all(
        kind in fds and os.fstat(fds[kind]).st_size >= num_bytes
        for kind, num_bytes in sizes.items()
    )


def packed_plan(plan: CachePlan) -> tuple[bytes, str]:
    """Return a plan as bytes, and the digest by which they can be checked to be whole."""
    packed = plan.to_proto().SerializeToString()
    return packed, blake3(packed).hexdigest()


def write_plan(fd: int, packed: bytes) -> None:
    """Write a plan into its region."""
    written = 0
    while written < len(packed):
        written += os.pwrite(fd, packed[written:], written)


def read_plan(fd: int, digest: str) -> CachePlan | None:
    """Return the plan in a region; None if its writer was killed before the end."""
    packed = b""
    while chunk := os.pread(fd, MIB, len(packed)):
        packed += chunk
    if blake3(packed).hexdigest() != digest:
        return None
    return CachePlan.from_proto(pb.CachePlan.FromString(packed))
