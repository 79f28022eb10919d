"""Own the numbers and limits of one cache as the core uses them; where they come from is the planner's business."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvlease.groups import GroupShape, Keeps
from kvleased.core.limits import UNLIMITED, TenantLimits

WAIT_MS_MAX: Final = 600_000
"""Ten minutes: the longest that a call may wait."""


class WritePolicy(Enum):
    """When a block's bytes are copied to lower tiers."""

    ON_EVICT = "on-evict"
    """When it is about to leave the tier above."""
    WRITE_THROUGH = "write-through"
    """As soon as it is committed."""
    AFTER_N_HITS = "after-n-hits"
    """As soon as it has been found `write_after_hits` times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The numbers of one cache, all of them taken from its plan or the settings."""

    num_blocks: int
    """Blocks of the device pool."""
    num_slots: int
    """Slots of the host pool; 0 means there is no host tier."""
    num_disk_slots: int = 0
    """Slots of the disk store, which blocks reach through the host pool; 0 means there is none."""
    uses_remote: bool = False
    """Whether there is a remote store, which blocks reach through the host pool."""
    write_policy: WritePolicy = WritePolicy.ON_EVICT
    write_after_hits: int = 1
    """Hits after which AFTER_N_HITS copies a block."""
    eviction_policy: str = "leaf-lru"
    """Which blocks leave the device pool first; one of `eviction.POLICIES`."""
    groups: tuple[GroupShape, ...]
    """The groups, each of which has a table; blocks of all groups come from one pool."""
    hash_tokens: int
    """Tokens that one key stands for."""
    hit_tokens: int
    """A prefix that is found ends at a multiple of this."""
    shares_prefixes: bool = True
    """Whether prefixes are found at all."""
    longest_request_tokens: int = 2**31 - 1
    """Tokens of the longest admissible request; its last block may have room for a few more."""
    null_blocks: int = 0
    """Blocks at the start of the device pool that are never granted."""
    parked_blocks: int = 0
    """Blocks of the device pool that an operator took out of use."""
    max_leases: int = 1024
    """Rows of the block table, which bounds the live leases."""
    max_waiting: int = 256
    """Requests that may wait for blocks at once."""
    max_pins: int = 256
    blocks_at_once: int = 1024
    """A move of a lease is begun, and ended, in one go if it has at most this many blocks; otherwise in parts."""
    lease_seconds: float = 30.0
    """Seconds after which a lease that was not renewed is quarantined."""
    ageing_seconds: float = 5.0
    """Seconds after which a waiting request rises to the next priority."""
    retry_after_ms: int = 50
    """How long a refusal tells the first caller in an empty queue to wait."""
    wait_ms_max: int = WAIT_MS_MAX
    """The longest that a refusal tells a caller to let its call wait."""
    layout_digest: int = 0
    """64 bits of the layout fingerprint, stored in every header."""
    num_ranks: int = 1
    """Ranks of an engine; ranks that each call for themselves share leases."""
    tenants: Mapping[int, TenantLimits] = field(default_factory=dict, hash=False)
    """Limits by tenant digest; the sum of their minima is at most usable_blocks."""
    tenant_default: TenantLimits = UNLIMITED
    """The limits of every other tenant; their minimum is 0."""

    @property
    def is_simple(self) -> bool:
        """Whether there is one group that keeps everything, with a key for each block: the common case, made fast."""
        return (
            len(self.groups) == 1
            and self.groups[0].keeps is Keeps.EVERYTHING
            and self.groups[0].keys_per_block == 1
            and self.hit_tokens == self.hash_tokens
            and not self.groups[0].is_drafted
            and not self.groups[0].extra_blocks
        )

    @property
    def table_width(self) -> int:
        """Entries of a row: the sum of all groups' places."""
        return sum(group.table_blocks for group in self.groups)

    @property
    def kernel_width(self) -> int:
        """Kernel blocks of a row: the sum over groups of places times kernel blocks per block."""
        return sum(group.table_blocks * group.kernel_blocks_per_block for group in self.groups)

    @property
    def usable_blocks(self) -> int:
        """num_blocks - null_blocks - parked_blocks: what can be granted."""
        return self.num_blocks - self.null_blocks - self.parked_blocks

    @property
    def limits_tenants(self) -> bool:
        """Whether some tenant has a minimum, or a maximum below the whole pool."""
        return any(
            one.min_blocks or one.max_blocks < self.usable_blocks
            for one in (self.tenant_default, *self.tenants.values())
        )

    @property
    def caps_leases(self) -> bool:
        """Whether the number of leases of some tenant is limited."""
        return any(
            one.leases_max < UNLIMITED.leases_max
            for one in (self.tenant_default, *self.tenants.values())
        )
