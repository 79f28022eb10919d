"""Own the JSON bodies of REST requests as pydantic models; paths are the server's business.

Field names are those of the protocol. `bytes` are base64. A body with a field that is not listed here is refused.
The models check types only. The daemon checks everything else, for all transports alike: so no field is required here,
and if a field's description is narrower than its type, the daemon refuses values outside of the description.
Replies follow the protocol's messages and have no models of their own.
"""

from array import array
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from kvlease.options import WRITE_AFTER_HITS_MAX
from kvlease.retention import RETAIN_PRIORITY_MAX, SECONDS_RETAINED_MAX
from kvlease.wire.fields import Body, Bytes, CopyMs, Count, Name, Number, Percent, WaitMs
from kvlease.wire.plans import PlanInputs

INT32_MAX: Final = 2**31 - 1
CHANGES_MAX: Final = 32
"""The most changes that one plan is compared with."""

TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(max_length=2**20)]
RequestId = Annotated[Name, Field(json_schema_extra={"minLength": 1, "maxLength": 128})]
Label = Annotated[Name, Field(json_schema_extra={"maxLength": 128})]
Tokens = Annotated[Count, Field(json_schema_extra={"minimum": 1, "maximum": INT32_MAX})]
Index = Annotated[Count, Field(json_schema_extra={"maximum": INT32_MAX})]
Keys = Annotated[bytes, Field(description="32-byte block keys, one after another, as base64.")]
Blocks = Annotated[bytes, Field(description="Packed little-endian int32 block ids, as base64.")]
LeaseIds = Annotated[bytes, Field(description="Packed little-endian int64 lease ids, as base64.")]


class Empty(Body):
    """A body without fields."""


class PlanBody(Body):
    """Ask for a plan."""

    inputs: PlanInputs = Field(default=PlanInputs(), description="What to plan for.")
    report: bool = Field(
        default=False, description="Whether to explain every number by its equation."
    )
    what_if: list[Name] = Field(
        default=[],
        max_length=CHANGES_MAX,
        description='Changes to compare, such as tokens_per_block=8; "all": the usual changes.',
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields that are given, nested ones as dictionaries."""
        return self.model_dump(by_alias=True, exclude_none=True)


class CacheOptions(Body):
    """How a cache is kept; an option that is left out has its default."""

    integrity: Name = Field(
        default="",
        description='How blocks that leave the device are checked: "xxh3" (default) or "none".',
    )
    write_policy: Name = Field(
        default="",
        description='When blocks are copied down: "on-evict" (default), "write-through" or "after-n-hits".',
    )
    write_after_hits: Count | None = Field(
        default=None,
        description="For after-n-hits: number of hits after which a block is copied.",
        json_schema_extra={"minimum": 1, "maximum": WRITE_AFTER_HITS_MAX},
    )
    eviction_policy: Name = Field(
        default="",
        description='What leaves the device first: "leaf-lru" (default), "arc", "s3-fifo", "lfu" or "adaptive".',
    )
    ghosts: list[Name] = Field(
        default=[],
        max_length=3,
        description="Other policies or sizes to try on live keys, each written POLICY or POLICY@BLOCKS.",
    )


class RegisterCacheBody(Body):
    """What a cache will hold."""

    inputs: PlanInputs = Field(default=PlanInputs(), description="What to plan for.")
    options: CacheOptions = Field(default=CacheOptions(), description="How to keep the cache.")

    def fields(self) -> dict[str, Any]:
        """Return the fields that are given, nested ones as dictionaries."""
        return self.model_dump(by_alias=True, exclude_none=True)


class AttachBody(Body):
    """Become a worker of a cache. Over REST the worker gets no memory."""

    worker_name: Label = Field(default="", description="A name for people to read.")
    rank: Count = Field(default=0, description="The rank of this process in its engine.")
    tenant: Label = Field(default="", description="The tenant whose blocks the worker may share.")
    resume_token: Name = Field(default="", description="The token of an earlier attach.")
    lease_ids: LeaseIds = b""
    layout_fingerprint: Name = Field(
        default="", description="Expected layout fingerprint; empty: any."
    )
    engine: Name = Field(
        default="", description="The engine that this is a rank of; empty: it calls for all ranks."
    )
    magazine: Label = Field(
        default="", description="The magazine that the engine's processes share; empty: none."
    )
    wants_key_counts: bool = Field(
        default=False, description="Whether to read the tenant's key counts, over the local socket."
    )


class HeartbeatBody(Body):
    """Renew the leases that the worker still knows."""

    lease_ids: LeaseIds = b""
    newest_lease_id: Number = Field(
        default=0, description="The largest lease id that the worker has ever received."
    )


class ReserveBody(Body):
    """Ask for blocks for one request."""

    request_id: RequestId = Field(default="", description="The engine's id: 1 to 128 characters.")
    keys: Keys = b""
    num_tokens: Tokens = Field(default=0, description="Tokens for the lease to cover: 1 or more.")
    wait_ms: WaitMs = 0
    token_ids: bytes | TokenIds = Field(
        default=b"",
        description="Token ids in place of keys: numbers, or packed little-endian int32 as base64.",
    )
    priority: Name = Field(
        default="",
        description='How soon it is served and how long its blocks stay: "low", "normal" (default) or "high".',
    )
    retain_seconds: Count = Field(
        default=0,
        description="Seconds for which blocks keep that priority after their last use; 0: while cached.",
        json_schema_extra={"maximum": SECONDS_RETAINED_MAX},
    )
    explain: bool = Field(
        default=False, description="Whether to tell why the rest of the prefix was not found."
    )
    retain_priority: Count | None = Field(
        default=None,
        description="How long blocks stay, in place of the priority: 0 (as low) to 50 (normal) to 100 (high).",
        json_schema_extra={"maximum": RETAIN_PRIORITY_MAX},
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields, token ids packed."""
        if isinstance(self.token_ids, bytes):
            return self.__dict__
        return self.__dict__ | {"token_ids": array("i", self.token_ids).tobytes()}


class ExtendBody(Body):
    """Make a lease longer."""

    num_tokens: Tokens = Field(default=0, description="Tokens for the lease to cover in all.")
    wait_ms: WaitMs = 0


class ForkBody(Body):
    """Let a second request go on from a running one."""

    request_id: RequestId = Field(
        default="", description="The new request's id: 1 to 128 characters."
    )
    num_tokens: Tokens = Field(
        default=0, description="Tokens for the new lease to cover: 1 or more."
    )
    wait_ms: CopyMs = 0


class TrimBody(Body):
    """Give back the blocks behind a token."""

    num_tokens: Tokens = Field(
        default=0, description="Tokens that the lease still covers afterwards."
    )


class CommitBody(Body):
    """Say that blocks hold the content that their keys name."""

    num_tokens: Index = Field(
        default=0, description="Number of tokens from the start that are written."
    )
    first_block: Index = Field(
        default=0, description="Index of the first key sent, in the request's chain of keys."
    )
    keys: Keys = b""


class MoveLeaseBody(Body):
    """Evict or reload a lease."""

    wait_ms: CopyMs = 0


class EvictBody(Body):
    """Evict cached blocks: those of given keys, or the coldest ones."""

    keys: Keys = b""
    num_blocks: Index = Field(
        default=0, description="Number of blocks to evict, of the coldest cached ones."
    )
    wait_ms: CopyMs = 0


class ReloadBody(Body):
    """Reload the blocks of given keys."""

    keys: Keys = b""
    wait_ms: CopyMs = 0


class KeysBody(Body):
    """Name cached blocks, to look them up or to pin them."""

    keys: Keys = b""


class ClearBody(Body):
    """Drop cached blocks that nobody holds."""

    tenant: Label = Field(
        default="", description="Drops only what this tenant has cached; empty: everything."
    )


class ResizeBody(Body):
    """How many blocks a pool can grant."""

    tier: Name = Field(default="", description='The pool: "device" or "host".')
    num_blocks: Index = Field(
        default=0,
        description="Blocks, or slots, that the pool can grant from then on; at most as registered.",
    )


class TenantLimits(Body):
    """What one tenant may have. Unless a field says otherwise, a limit is on the device pool of each cache."""

    min_percent: Percent = Field(
        default=0.0, description="Percent of the pool that the tenant can always get."
    )
    min_bytes: Bytes = Field(
        default=0, description="Bytes that it can always get; the larger minimum applies."
    )
    max_percent: Percent = Field(default=100.0, description="Percent that it can have at most.")
    max_bytes: Bytes = Field(
        default=0,
        description="Bytes that it can have at most, 0 for no limit; the smaller of the two maxima applies.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1_000,
        allow_inf_nan=False,
        description="Its weight, which decides its share against the others' weights.",
    )
    pinned_percent_max: Percent = Field(
        default=25.0, description="Percent that its pins can hold at most."
    )
    leases_max: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="Leases of one cache that it can have at once; 0 for no limit.",
    )


class SetTenantBody(Body):
    """Replace all limits of a tenant."""

    limits: TenantLimits = Field(
        default=TenantLimits(),
        description="The new limits; a limit that is left out has its default.",
    )
    revision: Number = Field(
        default=0, description="A number above the revision of the tenant's present limits."
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields that are given, the limits as a dictionary."""
        return self.model_dump()


class StepBody(Body):
    """Carry out one scheduler step: columns of equal length, and the reserves of the step."""

    verbs: bytes = Field(
        default=b"", description="One byte per operation, as base64: 1 extend, 2 commit, 3 release."
    )
    lease_ids: LeaseIds = b""
    num_tokens: bytes = Field(default=b"", description="Packed int32 numbers of tokens, as base64.")
    num_keys: bytes = Field(default=b"", description="Packed int32 numbers of keys, as base64.")
    first_blocks: bytes = Field(default=b"", description="Packed int32 block indexes, as base64.")
    keys: Keys = b""
    reserves: list[ReserveBody] = Field(
        default=[], max_length=2**16, description="Reserves; they do not wait."
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields, reserves as dictionaries."""
        return self.__dict__ | {"reserves": [reserve.fields() for reserve in self.reserves]}


class ExchangeBody(Body):
    """Change a magazine: the columns are carried out in the order of the fields."""

    publish_blocks: Blocks = b""
    publish_keys: Keys = b""
    publish_positions: bytes = Field(
        default=b"", description="Packed uint32 indexes in chains, as base64; empty: unknown."
    )
    retract_blocks: Blocks = b""
    drop_blocks: Blocks = b""
    hold_keys: Keys = b""
    stops_at_miss: bool = Field(
        default=False, description="Whether holding stops at the first key not on the device."
    )
    brings: bool = Field(
        default=False, description="Whether blocks only in a lower tier are brought to the device."
    )
    holds_all: bool = Field(
        default=False, description="Whether to hold every findable block of the tenant."
    )
    take_running: Count = Field(default=0, description="Blocks wanted for running requests.")
    take_new: Count = Field(default=0, description="Blocks wanted to admit new requests.")
    all_or_nothing: bool = Field(
        default=False,
        description="Whether to give none if fewer than wanted are available, of each of the two.",
    )
    sequence: Number = Field(
        default=0, description="One more than the sequence number of the magazine's last exchange."
    )
    missed_keys: Keys = Field(
        default=b"",
        description="Keys not asked for because they were surely absent; they count as missed.",
    )


class Holding(BaseModel):
    """Blocks of one owner in one state."""

    model_config = ConfigDict(frozen=True)

    owner: str = Field(description='Whose blocks they are: "you", "others" or "nobody".')
    state: str = Field(description="What holds the blocks, or what is being done to them.")
    num_blocks: int = Field(description="Number of blocks.")


class FieldProblem(BaseModel):
    """What is wrong with one field of a body."""

    model_config = ConfigDict(frozen=True)

    pointer: str = Field(description="The field as a JSON Pointer in a URI fragment.")
    field: str = Field(description="The field as programs write it.")
    detail: str = Field(description="What the field is, and what it must be.")


class Problem(BaseModel):
    """Why a call was refused (RFC 9457)."""

    model_config = ConfigDict(frozen=True)

    type: str = Field(description="A URN that names the kind of problem.")
    title: str = Field(description="The kind of problem, in a sentence.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What to change.")
    code: str = Field(description='The error code of kvlease, such as "POOL_FULL".')
    retryable: bool = Field(description="Whether the same call can succeed later.")
    resource: str | None = Field(default=None, description="The resource that is short.")
    need: int | None = Field(default=None, description="How much the call needed.")
    available: int | None = Field(default=None, description="How much was available.")
    limit: int | None = Field(default=None, description="How much there can ever be.")
    retry_after_ms: int | None = Field(
        default=None, description="Milliseconds after which to try again."
    )
    rule: str | None = Field(
        default=None, description="The stable name of the rule that was broken."
    )
    errors: list[FieldProblem] | None = Field(
        default=None, description="The fields of a body that do not fit, at most 16."
    )
    remedies: list[str] | None = Field(
        default=None,
        description="Settings with which the same call would work, each written name=value.",
    )
    holdings: list[Holding] | None = Field(
        default=None, description="Who holds what was missing, and in which state."
    )
