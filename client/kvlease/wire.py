"""Own the JSON bodies of REST requests as pydantic models; paths are the server's business.

Field names are those of the protocol. `bytes` are base64. A body with a field that is not listed here is refused.
What a field may hold beyond its type is the daemon's to check, for all transports alike; so none is required here.
Replies follow the protocol's messages and have no models of their own.
"""

from array import array
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

UINT32_MAX: Final = 2**32 - 1
INT32_MAX: Final = 2**31 - 1
JSON_INTEGER_MAX: Final = 2**53 - 1
"""The largest integer that every JSON reader carries exactly."""
TEXT_CHARS_MAX: Final = 2**20
"""Characters of a config.json."""
LAYERS_MAX: Final = 1024

Count = Annotated[int, Field(ge=0, le=UINT32_MAX)]
Millis = Count
Bytes = Annotated[int, Field(ge=0, le=JSON_INTEGER_MAX)]
Id = Annotated[int, Field(ge=-JSON_INTEGER_MAX, le=JSON_INTEGER_MAX)]
Name = Annotated[str, StringConstraints(max_length=256)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(max_length=2**20)]
Keys = Annotated[bytes, Field(description="32-byte block keys, one after the other, as base64.")]
LeaseIds = Annotated[bytes, Field(description="Packed little-endian int64 lease ids, as base64.")]
WaitMs = Annotated[Millis, Field(description="Milliseconds to wait for blocks; 0 does not wait.")]


class Body(BaseModel):
    """A JSON body: frozen, strict, and without fields of its own invention."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        val_json_bytes="base64",
        ser_json_bytes="base64",
        protected_namespaces=(),
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields by the names of the protocol, as its messages take them."""
        return self.__dict__


class Empty(Body):
    """A body that says nothing."""


class LayerSpec(Body):
    """What one layer keeps of each token."""

    name: Name = Field(default="", description="The layer's name, unique in its model.")
    kind: Name = Field(default="", description='The kind of layer, such as "full_attention".')
    num_kv_heads: Count = Field(
        default=0, description="Heads of K and V after any tensor parallel split."
    )
    head_size: Count = Field(default=0, description="Elements of one K head.")
    head_size_v: Count = Field(default=0, description="Elements of one V head; 0: head_size.")
    dtype: Name = Field(default="", description="float32, float16, bfloat16 or float8_e4m3fn.")


class PlanInputs(Body):
    """All that a plan depends on."""

    layers: list[LayerSpec] = Field(
        default=[],
        max_length=LAYERS_MAX,
        description="Layers in model order; empty when model_config is given.",
    )
    # The protocol's name is one that pydantic keeps for itself.
    config_text: Annotated[str, StringConstraints(max_length=TEXT_CHARS_MAX)] = Field(
        default="",
        alias="model_config",
        description="A Hugging Face config.json, as text; empty when layers are given.",
    )
    kv_dtype: Name = Field(default="", description="Element type; empty takes the model's own.")
    tokens_per_block: Count = Field(default=0, description="Tokens that one block covers.")
    device_bytes: Bytes = Field(
        default=0, description="Bytes of device memory to fill; 0 when device_blocks is given."
    )
    device_blocks: Bytes = Field(
        default=0, description="Number of device blocks; 0 when device_bytes is given."
    )
    host_bytes: Bytes = Field(default=0, description="Bytes of the host pool; 0: no host tier.")
    longest_request_tokens: Bytes = Field(
        default=0, description="Tokens of the longest request to admit; 0: as many as fit."
    )
    model_digest: Name = Field(default="", description="Digest or revision of the weights.")


class PlanBody(Body):
    """Ask for a plan."""

    inputs: PlanInputs = Field(default=PlanInputs(), description="What to plan for.")

    def fields(self) -> dict[str, Any]:
        """Return the fields, nested ones as dictionaries."""
        return self.model_dump(by_alias=True)


class RegisterCacheBody(PlanBody):
    """Say what a cache shall hold."""

    integrity: Name = Field(
        default="",
        description='How blocks that leave the device are checked: "xxh3" (where empty) or "none".',
    )


class AttachBody(Body):
    """Become a worker of a cache; over REST without memory."""

    worker_name: Name = Field(default="", description="A name for people to read.")
    rank: Count = Field(default=0, description="The rank of this process in its engine.")
    tenant: Name = Field(default="", description="The tenant whose blocks the worker may share.")
    resume_token: Name = Field(default="", description="The token of an earlier attach.")
    lease_ids: LeaseIds = b""
    layout_fingerprint: Name = Field(default="", description="Expected layout; empty: any.")


class HeartbeatBody(Body):
    """Renew the leases that the worker still knows."""

    lease_ids: LeaseIds = b""
    newest_lease_id: Id = Field(
        default=0, description="The largest lease id that the worker ever received."
    )


class ReserveBody(Body):
    """Ask for blocks for one request."""

    request_id: Name = Field(default="", description="The engine's id: 1 to 128 characters.")
    keys: Keys = b""
    num_tokens: Count = Field(default=0, description="Tokens that the lease shall cover.")
    wait_ms: WaitMs = 0
    token_ids: bytes | TokenIds = Field(
        default=b"",
        description="Token ids instead of keys: numbers, or packed little-endian int32 as base64.",
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields, token ids packed."""
        if isinstance(self.token_ids, bytes):
            return self.__dict__
        return self.__dict__ | {"token_ids": array("i", self.token_ids).tobytes()}


class ExtendBody(Body):
    """Make a lease longer."""

    num_tokens: Count = Field(default=0, description="Tokens that the lease shall cover in all.")
    wait_ms: WaitMs = 0


class CommitBody(Body):
    """Say that blocks hold what their keys say."""

    num_tokens: Count = Field(default=0, description="Tokens from the start that are written.")
    first_block: Count = Field(default=0, description="Index of the block of the first key.")
    keys: Keys = b""


class MoveLeaseBody(Body):
    """Evict or reload a lease."""

    wait_ms: WaitMs = 0


class EvictBody(Body):
    """Evict cached blocks: those of keys, or the coldest."""

    keys: Keys = b""
    num_blocks: Count = Field(default=0, description="How many of the coldest cached blocks.")
    wait_ms: WaitMs = 0


class ReloadBody(Body):
    """Reload the blocks of keys."""

    keys: Keys = b""
    wait_ms: WaitMs = 0


class KeysBody(Body):
    """Name cached blocks, to look them up or to pin them."""

    keys: Keys = b""


class StepBody(Body):
    """Carry one scheduler step: columns of equal length, and the reserves of the step."""

    verbs: bytes = Field(default=b"", description="One StepVerb a byte, as base64.")
    lease_ids: LeaseIds = b""
    num_tokens: bytes = Field(default=b"", description="Packed int32 token counts, as base64.")
    num_keys: bytes = Field(default=b"", description="Packed int32 numbers of keys, as base64.")
    first_blocks: bytes = Field(default=b"", description="Packed int32 block indexes, as base64.")
    keys: Keys = b""
    reserves: list[ReserveBody] = Field(
        default=[], max_length=2**16, description="Reserves; they do not wait."
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields, reserves as dictionaries."""
        return self.__dict__ | {"reserves": [reserve.fields() for reserve in self.reserves]}


class Problem(BaseModel):
    """Why a call was refused (RFC 9457)."""

    model_config = ConfigDict(frozen=True)

    type: str = Field(description="A URN that names the kind of problem.")
    title: str = Field(description="The kind of problem in a sentence.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What to change.")
    code: str = Field(description='The code of kvlease, such as "POOL_FULL".')
    retryable: bool = Field(description="Whether the same call can succeed later.")
    resource: str | None = Field(default=None, description="The limiting resource.")
    need: int | None = Field(default=None, description="How much was needed.")
    available: int | None = Field(default=None, description="How much there was.")
    limit: int | None = Field(default=None, description="How much there can ever be.")
    retry_after_ms: int | None = Field(default=None, description="When to try again.")
