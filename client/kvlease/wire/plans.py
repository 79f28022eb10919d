"""Own the JSON form of a plan's inputs; the bodies that carry them are `bodies`'s business."""

from typing import Annotated, Final

from pydantic import Field, StringConstraints

from kvlease.spec import BYTES_PER_ELEMENT, KINDS, QUANTISATIONS
from kvlease.units import RANKS_MAX
from kvlease.wire.fields import Body, Bytes, Count, Id, Name

TEXT_CHARS_MAX: Final = 2**20
"""Characters of a config.json."""
LAYERS_MAX: Final = 1024
"""Layers of a model, or of one of its ranks."""
BACKENDS_MAX: Final = 64
BLOCK_SIZES_MAX: Final = 64
"""Block sizes that one backend lists."""
STATES_MAX: Final = 16
"""Tensors of one recurrent state."""
DIMENSIONS_MAX: Final = 8


class Shape(Body):
    """The dimensions of one tensor."""

    extents: list[Bytes] = Field(
        default=[], max_length=DIMENSIONS_MAX, description="Elements along each axis."
    )


class LayerSpec(Body):
    """What one layer keeps of a request. A field that is left out has the default of its kind."""

    name: Name = Field(default="", description="The layer's name, unique in its model.")
    kind: Name = Field(default="", description=f"The kind of layer: {', '.join(KINDS)}.")
    num_kv_heads: Bytes | None = Field(
        default=None, description="Number of K and V heads, after any tensor-parallel split."
    )
    head_size: Bytes | None = Field(default=None, description="Elements of one K head.")
    head_size_v: Bytes | None = Field(
        default=None,
        description="Elements of one V head; default: those of a K head, or none for latent kinds.",
    )
    dtype: Name | None = Field(default=None, description=f"{', '.join(BYTES_PER_ELEMENT)}.")
    backend: Name = Field(default="", description="The attention backend that reads the pages.")
    tokens_per_block: Bytes | None = Field(
        default=None, description="Tokens that one block covers; default: the plan's."
    )
    bytes_per_page_padded: Bytes | None = Field(
        default=None, description="Bytes of a page, if it must be larger than its content."
    )
    block_stride_multiple_bytes: Id | None = Field(
        default=None,
        description="The distance between the pages of neighbouring blocks is a multiple of this.",
    )
    block_stride_multiple_tokens: Id | None = Field(
        default=None, description="The same multiple, given as the page of this many tokens."
    )
    quantisation: Name | None = Field(default=None, description=f"{', '.join(QUANTISATIONS)}.")
    num_head_slots: Bytes | None = Field(
        default=None, description="Heads that a page has room for."
    )
    bytes_per_state_packed: Bytes | None = Field(
        default=None,
        description="Bytes of one head's entry, if the backend packs entries in its own way.",
    )
    tokens_per_state: Bytes | None = Field(
        default=None, description="Tokens that are compressed into one entry."
    )
    states_per_token: Bytes | None = Field(
        default=None, description="Entries that are kept for one token."
    )
    tensor_shards_max: Bytes | None = Field(
        default=None,
        description="Number of tensor-parallel ranks that can keep different heads; 0: all of them.",
    )
    is_context_sharded: bool | None = Field(
        default=None, description="Whether context-parallel ranks keep different tokens."
    )
    window_tokens: Bytes | None = Field(
        default=None, description="Tokens that attention looks at, as a window."
    )
    chunk_tokens: Bytes | None = Field(default=None, description="Tokens of a chunk.")
    is_causal: bool | None = Field(
        default=None, description="Whether a token sees only the tokens before it."
    )
    sink_tokens: Bytes | None = Field(
        default=None, description="Entries that every request attends to."
    )
    retained_window_tokens: Bytes | None = Field(
        default=None, description="The window of a layer that also keeps the tokens before it."
    )
    retained_tokens: Bytes | None = Field(
        default=None, description="Tokens before the window that must stay."
    )
    packed_format: Name | None = Field(
        default=None, description="The backend's name for how a latent state is packed."
    )
    page_multiple_bytes: Bytes | None = Field(
        default=None, description="A latent page is padded to a multiple of this."
    )
    model_version: Name | None = Field(
        default=None, description="The model family whose kernels read the pages."
    )
    role: Name | None = Field(
        default=None, description="What latent states are for: sparse or indexer."
    )
    leads_index_group: bool | None = Field(
        default=None,
        description="Whether the following layers reuse this layer's selection of tokens.",
    )
    decodes_several_tokens: bool | None = Field(
        default=None, description="Whether speculative decoding reads several new tokens at once."
    )
    is_replayed: bool | None = Field(
        default=None, description="Whether the window is recomputed after a prefix hit."
    )
    shapes: list[Shape] = Field(
        default=[], max_length=STATES_MAX, description="The tensors of a recurrent state."
    )
    dtypes: list[Name] = Field(
        default=[], max_length=STATES_MAX, description="The element types of those tensors."
    )
    num_speculative_blocks: Bytes | None = Field(
        default=None, description="States kept beside the current one for speculative tokens."
    )
    num_checkpoint_blocks: Bytes | None = Field(
        default=None, description="States kept beside the current one for checkpoints."
    )
    checkpoint_multiple_tokens: Bytes | None = Field(
        default=None, description="Checkpoints lie at multiples of this many tokens."
    )
    is_replicated: bool | None = Field(
        default=None, description="Whether all tensor-parallel ranks keep the same state."
    )


Layers = Annotated[list[LayerSpec], Field(max_length=LAYERS_MAX)]


class RankInputs(Body):
    """What one rank of an engine brings."""

    device_bytes: Bytes | None = Field(
        default=None,
        description="Bytes of the rank's device memory to fill; default: the device_bytes of the plan's inputs.",
    )
    layers: Layers = Field(
        default=[],
        description="The layers that the rank keeps; empty: the layers of the plan's inputs.",
    )
    keeps_nothing: bool = Field(
        default=False, description="Whether the rank keeps no layer at all."
    )


class ParallelInputs(Body):
    """How a model is split over ranks."""

    tensor_ranks: Count | None = Field(
        default=None, description="Ranks that share the heads of every layer; default: 1."
    )
    pipeline_ranks: Count | None = Field(
        default=None, description="Ranks that share the layers; default: 1."
    )
    context_ranks: Count | None = Field(
        default=None,
        description="Ranks that share the tokens of a request while decoding; default: 1.",
    )


class EngineInputs(Body):
    """What the plan must know about how the engine runs."""

    tokens_per_step: Bytes | None = Field(
        default=None, description="Most tokens that one scheduler step computes; default: 2048."
    )
    steps_in_flight: Count | None = Field(
        default=None, description="Steps that may be writing at the same time; default: 1."
    )
    lookahead_tokens: Bytes | None = Field(
        default=None, description="Tokens that speculative decoding prefills ahead."
    )
    encoder_tokens_max: Bytes | None = Field(
        default=None, description="Tokens of the longest encoder input."
    )
    state_mode: Name | None = Field(
        default=None,
        description="Which states of recurrent layers are kept: none (default), align or all.",
    )
    prefix_caching: bool | None = Field(
        default=None, description="Whether requests share prefixes; default: yes."
    )
    has_connector: bool | None = Field(
        default=None, description="Whether others can find blocks even without prefix caching."
    )
    match_tokens: Bytes | None = Field(
        default=None,
        description="Distance in tokens between the places where a prefix that is found may end.",
    )
    one_group: bool | None = Field(
        default=None, description="Whether all layers must share one table."
    )
    drafts_with_last_layer: bool | None = Field(
        default=None, description="Whether the last layer belongs to a draft model."
    )


class BackendInputs(Body):
    """The sizes of kernel blocks that one attention backend can read."""

    name: Name = Field(default="", description="The backend's name.")
    exact_tokens: list[Count] = Field(
        default=[], max_length=BLOCK_SIZES_MAX, description="Sizes that it can read, in tokens."
    )
    multiples_tokens: list[Count] = Field(
        default=[],
        max_length=BLOCK_SIZES_MAX,
        description="The backend can read every multiple of these sizes.",
    )


class PlanInputs(Body):
    """Everything that a plan depends on."""

    layers: Layers = Field(
        default=[],
        description="Layers in model order, as one rank keeps them; empty if model_config is given.",
    )
    # pydantic reserves the protocol's name for itself.
    config_text: Annotated[str, StringConstraints(max_length=TEXT_CHARS_MAX)] = Field(
        default="",
        alias="model_config",
        description="The text of a Hugging Face config.json; empty if layers are given.",
    )
    kv_dtype: Name = Field(
        default="", description="Element type of the cache; empty: the model's own."
    )
    tokens_per_block: Count = Field(
        default=0, description="Tokens per block, for layers that do not set their own."
    )
    layout: Name = Field(
        default="",
        description="Order of the axes in memory, such as LBHNC; empty: blocks outermost.",
    )
    device_bytes: Bytes = Field(
        default=0,
        description="Bytes of device memory that each rank fills; 0 if device_blocks is given.",
    )
    device_blocks: Bytes = Field(
        default=0,
        description="Number of device blocks; if device_bytes is given too, it must suffice.",
    )
    null_blocks: Count = Field(
        default=0, description="Blocks at the start of the pool that are never granted."
    )
    block_multiple_bytes: Count | None = Field(
        default=None,
        description="With blocks outermost, the size of a block is a multiple of this; default: 64.",
    )
    host_bytes: Bytes = Field(
        default=0, description="Bytes of the host pool, for all ranks together; 0: no host tier."
    )
    disk_bytes: Bytes = Field(default=0, description="Bytes of the disk store; 0: none.")
    remote_bytes: Bytes = Field(default=0, description="Bytes of the remote store; 0: none.")
    blocks_per_slot: Count | None = Field(
        default=None, description="Blocks that one slot of a lower tier holds; default: 1."
    )
    slot_multiple_bytes: Count | None = Field(
        default=None, description="The size of a host slot is a multiple of this; default: 64."
    )
    longest_request_tokens: Bytes = Field(
        default=0, description="Tokens of the longest request to admit; 0: as many as fit."
    )
    fit_longest_request: bool = Field(
        default=False,
        description="Whether a longest request that does not fit is shortened instead of refused.",
    )
    engine: EngineInputs | None = Field(default=None, description="How the engine runs.")
    parallel: ParallelInputs | None = Field(default=None, description="How the model is split.")
    ranks: list[RankInputs] = Field(
        default=[],
        max_length=RANKS_MAX,
        description="One entry for each rank, if ranks differ; empty: all ranks are equal.",
    )
    backends: list[BackendInputs] = Field(
        default=[],
        max_length=BACKENDS_MAX,
        description="Backends that layers name and that the planner does not know.",
    )
    model_digest: Name = Field(default="", description="Digest or revision of the weights.")
