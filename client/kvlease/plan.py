"""Own a plan: all numbers and placements of a cache, as both ends use them; making one is the planner's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from kvlease.errors import InvalidError
from kvlease.geometry import blocks_covering, full_blocks
from kvlease.spec import FullAttention, LayerSpec
from kvlease.v1 import kvlease_pb2 as pb

KINDS: Final[Mapping[str, type[LayerSpec]]] = {FullAttention.kind: FullAttention}
"""Every kind of layer that can be described, by its name on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """All that a plan depends on."""

    layers: tuple[LayerSpec, ...] = ()
    """Layers in model order; empty when `model_config` is given."""
    model_config: str = ""
    """The text of a Hugging Face config.json; empty when `layers` are given."""
    kv_dtype: str = ""
    """Element type of the cache; empty takes the model's own. Only with `model_config`."""
    tokens_per_block: int
    device_bytes: int = 0
    """Bytes of device memory to fill; 0 when `device_blocks` is given."""
    device_blocks: int = 0
    """Blocks of the device pool; 0 when `device_bytes` is given."""
    host_bytes: int = 0
    """Bytes of host memory to fill; 0 means no host tier."""
    longest_request_tokens: int = 0
    """Tokens of the longest request to admit; 0 means as many as the pool covers."""
    model_digest: str = ""
    """Digest or revision of the weights; part of every block key."""

    def to_proto(self) -> pb.PlanInputs:
        """Return the message that says the same."""
        return pb.PlanInputs(
            layers=[_spec_to_proto(layer) for layer in self.layers],
            model_config=self.model_config,
            kv_dtype=self.kv_dtype,
            tokens_per_block=self.tokens_per_block,
            device_bytes=self.device_bytes,
            device_blocks=self.device_blocks,
            host_bytes=self.host_bytes,
            longest_request_tokens=self.longest_request_tokens,
            model_digest=self.model_digest,
        )

    @classmethod
    def from_proto(cls, message: pb.PlanInputs) -> Self:
        """Return what the message says.

        Raises:
            InvalidError: it names an unknown kind of layer.
        """
        return cls(
            layers=tuple(_spec_from_proto(layer) for layer in message.layers),
            model_config=message.model_config,
            kv_dtype=message.kv_dtype,
            tokens_per_block=message.tokens_per_block,
            device_bytes=message.device_bytes,
            device_blocks=message.device_blocks,
            host_bytes=message.host_bytes,
            longest_request_tokens=message.longest_request_tokens,
            model_digest=message.model_digest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlacement:
    """Where one layer's pages lie: K [heads, tokens, head_size], then V, `offset_bytes` into every block."""

    name: str
    group: int
    """The group whose table the layer reads."""
    offset_bytes: int
    bytes_per_page: int
    spec: LayerSpec
    """What the layer keeps, with nothing left to a default."""

    def to_proto(self) -> pb.LayerPlacement:
        """Return the message that says the same."""
        return pb.LayerPlacement(
            name=self.name,
            group=self.group,
            offset_bytes=self.offset_bytes,
            bytes_per_page=self.bytes_per_page,
            spec=_spec_to_proto(self.spec),
        )

    @classmethod
    def from_proto(cls, message: pb.LayerPlacement) -> Self:
        """Return what the message says.

        Raises:
            InvalidError: it names an unknown kind of layer.
        """
        return cls(
            name=message.name,
            group=message.group,
            offset_bytes=message.offset_bytes,
            bytes_per_page=message.bytes_per_page,
            spec=_spec_from_proto(message.spec),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Every number of a cache; block b lies at b * bytes_per_block of its region."""

    layout_fingerprint: str
    """Hex of the 32-byte digest of all that decides where a byte lies and what it means."""
    tokens_per_block: int
    bytes_per_token: int
    """Bytes that one token takes over all layers."""
    bytes_per_block: int
    """Bytes from one block to the next: all pages, rounded up to a cache line."""
    num_blocks: int
    num_slots: int
    """Slots of the host pool, one block each."""
    device_bytes: int
    """num_blocks * bytes_per_block."""
    host_bytes: int
    """num_slots * bytes_per_block."""
    longest_request_tokens: int
    """blocks_per_longest_request * tokens_per_block: admission counts whole blocks."""
    blocks_per_longest_request: int
    capacity_tokens: int
    """num_blocks * tokens_per_block."""
    layers: tuple[LayerPlacement, ...]
    model_digest: str

    def blocks_covering(self, num_tokens: int) -> int:
        """Return the blocks that hold `num_tokens`, the last one perhaps in part."""
        return blocks_covering(num_tokens, self.tokens_per_block)

    def full_blocks(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` fill to the end."""
        return full_blocks(num_tokens, self.tokens_per_block)

    def to_proto(self) -> pb.CachePlan:
        """Return the message that says the same."""
        return pb.CachePlan(
            layout_fingerprint=self.layout_fingerprint,
            tokens_per_block=self.tokens_per_block,
            bytes_per_token=self.bytes_per_token,
            bytes_per_block=self.bytes_per_block,
            num_blocks=self.num_blocks,
            num_slots=self.num_slots,
            device_bytes=self.device_bytes,
            host_bytes=self.host_bytes,
            longest_request_tokens=self.longest_request_tokens,
            blocks_per_longest_request=self.blocks_per_longest_request,
            capacity_tokens=self.capacity_tokens,
            layers=[layer.to_proto() for layer in self.layers],
            model_digest=self.model_digest,
        )

    @classmethod
    def from_proto(cls, message: pb.CachePlan) -> Self:
        """Return what the message says.

        Raises:
            InvalidError: it names an unknown kind of layer.
        """
        return cls(
            layout_fingerprint=message.layout_fingerprint,
            tokens_per_block=message.tokens_per_block,
            bytes_per_token=message.bytes_per_token,
            bytes_per_block=message.bytes_per_block,
            num_blocks=message.num_blocks,
            num_slots=message.num_slots,
            device_bytes=message.device_bytes,
            host_bytes=message.host_bytes,
            longest_request_tokens=message.longest_request_tokens,
            blocks_per_longest_request=message.blocks_per_longest_request,
            capacity_tokens=message.capacity_tokens,
            layers=tuple(LayerPlacement.from_proto(layer) for layer in message.layers),
            model_digest=message.model_digest,
        )


def _spec_to_proto(spec: LayerSpec) -> pb.LayerSpec:
    return pb.LayerSpec(
        name=spec.name,
        kind=spec.kind,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
    )


def _spec_from_proto(message: pb.LayerSpec) -> LayerSpec:
    if message.kind not in KINDS:
        text = f"layer {message.name[:40]!r} is of kind {message.kind[:40]!r}; this version knows {', '.join(KINDS)}"
        raise InvalidError(text, resource="kind")
    return KINDS[message.kind](
        name=message.name,
        num_kv_heads=message.num_kv_heads,
        head_size=message.head_size,
        head_size_v=message.head_size_v,
        dtype=message.dtype,
    )
