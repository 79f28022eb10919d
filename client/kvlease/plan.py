"""Own a plan: all numbers and placements of a cache, as both ends use them; making a plan is the planner's business."""

from dataclasses import dataclass
from typing import Self

from kvlease._records import check_record, from_proto, to_proto
from kvlease.geometry import blocks_covering, full_blocks
from kvlease.layout import Layout
from kvlease.spec import LayerSpec
from kvlease.v1 import kvlease_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInputs:
    """What one rank of an engine brings: its memory and, where ranks differ, its layers."""

    device_bytes: int | None = None
    """Bytes of the rank's device memory to fill; None takes `PlanInputs.device_bytes`."""
    layers: tuple[LayerSpec, ...] = ()
    """The layers that the rank keeps, in model order; empty takes `PlanInputs.layers`."""
    keeps_nothing: bool = False
    """Whether the rank keeps no layer at all, such as a pipeline stage without attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelInputs:
    """How a model is split over ranks."""

    tensor_ranks: int = 1
    """Ranks that share the heads of every layer."""
    pipeline_ranks: int = 1
    """Ranks that share the layers."""
    context_ranks: int = 1
    """Ranks that share the tokens of a request while decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """What the plan must know of how the engine runs."""

    tokens_per_step: int = 2048
    """The most tokens that one scheduler step computes."""
    steps_in_flight: int = 1
    """Steps whose writes may be under way at once; windows also keep the tokens of these steps."""
    lookahead_tokens: int = 0
    """Tokens that speculative decoding prefills ahead."""
    encoder_tokens_max: int = 0
    """Tokens of the longest encoder input, for cross attention."""
    state_mode: str = "none"
    """Which recurrent states are kept: only the current one ("none"), also those at block ends ("align"), or "all"."""
    prefix_caching: bool = True
    """Whether the engine shares prefixes between requests, which decides how blocks are sized and matched; callers that
    name keys find what they name either way."""
    has_connector: bool = False
    """Whether others, such as lower tiers, find blocks even without prefix caching."""
    match_tokens: int | None = None
    """A prefix can be found up to each multiple of so many tokens; None: the smallest number that all groups allow."""
    one_group: bool = False
    """Whether all layers must share one table; windows then keep every token."""
    drafts_with_last_layer: bool = False
    """Whether the last layer belongs to a draft model; its group is then marked as drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInputs:
    """The kernel blocks that one attention backend can read."""

    name: str
    exact_tokens: tuple[int, ...] = ()
    """Kernel block sizes that it reads."""
    multiples_tokens: tuple[int, ...] = ()
    """It also reads every multiple of these sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """All that a plan depends on."""

    layers: tuple[LayerSpec, ...] = ()
    """Layers in model order, as one rank keeps them; empty when `model_config` is given."""
    model_config: str = ""
    """The text of a Hugging Face config.json; empty when `layers` are given."""
    kv_dtype: str = ""
    """Element type of the cache; empty takes the model's own. Only with `model_config`."""
    tokens_per_block: int
    """Tokens per block of the layers that do not say it themselves."""
    layout: str = ""
    """Order of the axes in memory, such as LBHNC; empty: blocks outermost."""
    device_bytes: int = 0
    """Bytes of device memory that each rank fills; 0 when `device_blocks` is given."""
    device_blocks: int = 0
    """Blocks of the device pool, from which all later numbers follow; if `device_bytes` is given, it must suffice."""
    null_blocks: int = 0
    """Blocks at the start of the pool that are never granted: 1 if tables are padded with block 0."""
    block_multiple_bytes: int = 64
    """If blocks are outermost, each takes a multiple of this, by default a cache line."""
    host_bytes: int = 0
    """Bytes of host memory to fill, for all ranks together; 0 means no host tier."""
    disk_bytes: int = 0
    """Bytes of a disk store; 0 means none."""
    remote_bytes: int = 0
    """Bytes of a remote store; 0 means none."""
    blocks_per_slot: int = 1
    """Blocks that one slot of a lower tier holds."""
    slot_multiple_bytes: int = 64
    """Slots of the host tier take a multiple of this."""
    longest_request_tokens: int = 0
    """Tokens of the longest request to admit; 0 means as many as fit."""
    fit_longest_request: bool = False
    """Whether a longest request that does not fit is shortened instead of refused."""
    engine: EngineInputs = EngineInputs()
    parallel: ParallelInputs = ParallelInputs()
    ranks: tuple[RankInputs, ...] = ()
    """One for each rank that differs from the others; empty: tensor_ranks equal ones."""
    backends: tuple[BackendInputs, ...] = ()
    """The backends that layers name, beyond those that the planner knows."""
    model_digest: str = ""
    """Digest or revision of the weights; part of every block key."""

    def to_proto(self) -> pb.PlanInputs:
        """Return the message that says the same.

        Raises:
            InvalidError: a field is of another type than declared, or out of range; the message names its path.
        """
        check_record(self, pb.PlanInputs.DESCRIPTOR)
        return to_proto(self, pb.PlanInputs)

    @classmethod
    def from_proto(cls, message: pb.PlanInputs) -> Self:
        """Return what the message says.

        Raises:
            InvalidError: the message names an unknown kind of layer, or a field that the kind does not have.
        """
        return from_proto(message, cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlacement:
    """Where one layer's pages lie in its rank's region: page b starts at offset_bytes + b * block_stride_bytes."""

    name: str
    group: int
    """The group whose table the layer reads."""
    offset_bytes: int
    block_stride_bytes: int
    bytes_per_page: int
    """Bytes of the page, padding included."""
    head_stride_bytes: int
    """Bytes from one head slot of a page to the next."""
    state_stride_bytes: int
    """Bytes from one state of a head to the next."""
    spec: LayerSpec
    """What the layer keeps, with every default filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """A run of equal layers of one group, equally far apart, so that an engine can view them as one tensor."""

    group: int
    layer_names: tuple[str, ...]
    offset_bytes: int
    """Where the first layer's page of block 0 starts."""
    layer_stride_bytes: int
    block_stride_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One piece of every block: block b has num_bytes at offset_bytes + b * block_stride_bytes of its region."""

    offset_bytes: int
    block_stride_bytes: int
    num_bytes: int
    slot_offset_bytes: int
    """Where the piece lies in the rank's cell of a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The device pool of one rank; all groups share its bytes from byte 0 on, as a block serves one group at a time."""

    rank: int
    bytes_per_block: int
    """Bytes that one block takes in the region, in all its pieces together."""
    device_bytes: int
    """num_blocks * bytes_per_block."""
    bytes_per_longest_request: int
    """bytes_per_block * blocks_per_longest_request."""
    layers: tuple[LayerPlacement, ...]
    tensors: tuple[TensorPlan, ...]
    extents: tuple[Extent, ...]
    """The pieces that make up a block, without gaps or overlaps in the slot."""
    slot_cell_offset_bytes: int
    """Where the rank's cell starts in a slot of a lower tier; ranks that keep equal bytes share a cell."""
    slot_cell_bytes: int
    """Bytes of the cell: bytes_per_block * blocks_per_slot."""
    needs_scrub: bool
    """Whether a granted block must be zeroed, because groups read the same bytes as different types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Layers that share one table."""

    spec: LayerSpec
    """What the layers keep; if their pages differ, the spec of the first layer."""
    layer_names: tuple[str, ...]
    """All layers of the group over all ranks, in model order."""
    tokens_per_block: int
    """Tokens that one block covers on one rank."""
    bytes_per_page: int
    """Bytes of one layer's page; if the pages differ, of all layers' pages together."""
    has_equal_layers: bool
    """Whether all layers have the same spec; otherwise each layer's view needs the layer's own spec."""
    blocks_per_longest_request: int
    table_blocks: int
    """Entries that the longest request has in the group's part of its table row."""
    kernel_tokens_per_block: int
    """Tokens of one kernel block."""
    kernel_blocks_per_block: int
    """Kernel blocks that one block consists of."""
    kernel_block_stride: int
    """Kernel blocks from one block to the next: kernel_blocks_per_block, or more if other pages lie in between."""
    is_prefix_cacheable: bool
    is_context_sharded: bool
    is_drafted: bool
    """Whether a draft model reads the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Bytes that hold nothing, and why."""

    cause: str
    """page_padding, uneven_groups, block_padding, null_blocks, rank_minimum, unfilled_budget or slot_padding."""
    tier: str
    """device or host."""
    num_bytes: int
    """Over all ranks."""
    why: str
    """One sentence with the numbers in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Every number of a cache."""

    layout_fingerprint: str
    """Hex of the 32-byte digest of all that decides where a byte lies and what it means."""
    layout: Layout
    model_digest: str
    num_blocks: int
    """Blocks of every rank's pool: as many as the smallest rank has room for."""
    null_blocks: int
    """Blocks at the start that are never granted."""
    longest_request_tokens: int
    blocks_per_longest_request: int
    """The sum over groups."""
    capacity_tokens: int
    """Tokens of the longest requests that fit at once: floor(usable_blocks / blocks_per_longest_request * tokens)."""
    tokens_per_block: int
    """The smallest number among the groups that cache prefixes."""
    hash_block_tokens: int
    """Tokens that one key stands for."""
    scheduler_block_tokens: int
    """At every multiple of so many tokens, a block ends in every group."""
    hit_alignment_tokens: int
    """A prefix that is found ends at a multiple of this."""
    groups: tuple[GroupPlan, ...]
    ranks: tuple[RankPlan, ...]
    tensor_replicas: int
    """Tensor parallel ranks that keep the same bytes."""
    num_slots: int
    """Slots of the host pool."""
    blocks_per_slot: int
    bytes_per_slot: int
    """Bytes from one slot to the next: all ranks' cells, padded."""
    num_disk_slots: int
    num_remote_slots: int
    waste: tuple[Waste, ...]
    context_ranks: int = 1
    """Ranks that share the tokens of a request while decoding."""

    @property
    def usable_blocks(self) -> int:
        """num_blocks - null_blocks: what can be granted."""
        return self.num_blocks - self.null_blocks

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the first rank."""
        return self.ranks[0].bytes_per_block

    @property
    def device_bytes_per_block(self) -> int:
        """Bytes of one block of all ranks together."""
        return sum(rank.bytes_per_block for rank in self.ranks)

    @property
    def device_bytes(self) -> int:
        """Bytes of all ranks' device pools."""
        return sum(rank.device_bytes for rank in self.ranks)

    @property
    def host_bytes(self) -> int:
        """num_slots * bytes_per_slot."""
        return self.num_slots * self.bytes_per_slot

    @property
    def concurrency(self) -> float:
        """Longest requests that fit at once: usable_blocks / blocks_per_longest_request."""
        return self.usable_blocks / max(1, self.blocks_per_longest_request)

    @property
    def layers(self) -> tuple[LayerPlacement, ...]:
        """The layers of the first rank."""
        return self.ranks[0].layers

    def blocks_covering(self, num_tokens: int) -> int:
        """Return how many blocks of the finest group hold `num_tokens`; the last block may be partial."""
        return blocks_covering(num_tokens, self.tokens_per_block)

    def full_blocks(self, num_tokens: int) -> int:
        """Return how many blocks of the finest group `num_tokens` fill to the end."""
        return full_blocks(num_tokens, self.tokens_per_block)

    def to_proto(self) -> pb.CachePlan:
        """Return the message that says the same."""
        return to_proto(self, pb.CachePlan)

    @classmethod
    def from_proto(cls, message: pb.CachePlan) -> Self:
        """Return what the message says.

        Raises:
            InvalidError: the message names an unknown kind of layer.
        """
        return from_proto(message, cls)
