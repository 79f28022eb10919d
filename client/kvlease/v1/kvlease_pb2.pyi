from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepVerb(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_VERB_UNSPECIFIED: _ClassVar[StepVerb]
    STEP_VERB_EXTEND: _ClassVar[StepVerb]
    STEP_VERB_COMMIT: _ClassVar[StepVerb]
    STEP_VERB_RELEASE: _ClassVar[StepVerb]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID: _ClassVar[ErrorCode]
    ERROR_CODE_NEVER_FITS: _ClassVar[ErrorCode]
    ERROR_CODE_POOL_FULL: _ClassVar[ErrorCode]
    ERROR_CODE_BUSY: _ClassVar[ErrorCode]
    ERROR_CODE_DRAINING: _ClassVar[ErrorCode]
    ERROR_CODE_STARTING: _ClassVar[ErrorCode]
    ERROR_CODE_STALE_EPOCH: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_LEASE: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_WORKER: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_CACHE: _ClassVar[ErrorCode]
    ERROR_CODE_ID_REUSED: _ClassVar[ErrorCode]
    ERROR_CODE_LAYOUT_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_YOURS: _ClassVar[ErrorCode]
    ERROR_CODE_TOO_LARGE: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE: _ClassVar[ErrorCode]
    ERROR_CODE_WRONG_STATE: _ClassVar[ErrorCode]
    ERROR_CODE_CACHE_IN_USE: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_UNAVAILABLE: _ClassVar[ErrorCode]
    ERROR_CODE_COPY_FAILED: _ClassVar[ErrorCode]
    ERROR_CODE_STALE_REVISION: _ClassVar[ErrorCode]
STEP_VERB_UNSPECIFIED: StepVerb
STEP_VERB_EXTEND: StepVerb
STEP_VERB_COMMIT: StepVerb
STEP_VERB_RELEASE: StepVerb
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID: ErrorCode
ERROR_CODE_NEVER_FITS: ErrorCode
ERROR_CODE_POOL_FULL: ErrorCode
ERROR_CODE_BUSY: ErrorCode
ERROR_CODE_DRAINING: ErrorCode
ERROR_CODE_STARTING: ErrorCode
ERROR_CODE_STALE_EPOCH: ErrorCode
ERROR_CODE_UNKNOWN_LEASE: ErrorCode
ERROR_CODE_UNKNOWN_WORKER: ErrorCode
ERROR_CODE_UNKNOWN_CACHE: ErrorCode
ERROR_CODE_ID_REUSED: ErrorCode
ERROR_CODE_LAYOUT_MISMATCH: ErrorCode
ERROR_CODE_NOT_YOURS: ErrorCode
ERROR_CODE_TOO_LARGE: ErrorCode
ERROR_CODE_DEADLINE: ErrorCode
ERROR_CODE_WRONG_STATE: ErrorCode
ERROR_CODE_CACHE_IN_USE: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_UNAVAILABLE: ErrorCode
ERROR_CODE_COPY_FAILED: ErrorCode
ERROR_CODE_STALE_REVISION: ErrorCode

class Shape(_message.Message):
    __slots__ = ("extents",)
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, extents: _Optional[_Iterable[int]] = ...) -> None: ...

class LayerSpec(_message.Message):
    __slots__ = ("name", "kind", "num_kv_heads", "head_size", "head_size_v", "dtype", "backend", "tokens_per_block", "bytes_per_page_padded", "block_stride_multiple_bytes", "block_stride_multiple_tokens", "quantisation", "num_head_slots", "bytes_per_state_packed", "tokens_per_state", "states_per_token", "tensor_shards_max", "is_context_sharded", "window_tokens", "chunk_tokens", "is_causal", "sink_tokens", "retained_window_tokens", "retained_tokens", "packed_format", "page_multiple_bytes", "model_version", "role", "leads_index_group", "decodes_several_tokens", "is_replayed", "shapes", "dtypes", "num_speculative_blocks", "num_checkpoint_blocks", "checkpoint_multiple_tokens", "is_replicated")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_V_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_PAGE_PADDED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_MULTIPLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_MULTIPLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    NUM_HEAD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_STATE_PACKED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STATE_FIELD_NUMBER: _ClassVar[int]
    STATES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TENSOR_SHARDS_MAX_FIELD_NUMBER: _ClassVar[int]
    IS_CONTEXT_SHARDED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_CAUSAL_FIELD_NUMBER: _ClassVar[int]
    SINK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKED_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PAGE_MULTIPLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LEADS_INDEX_GROUP_FIELD_NUMBER: _ClassVar[int]
    DECODES_SEVERAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_REPLAYED_FIELD_NUMBER: _ClassVar[int]
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECKPOINT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_MULTIPLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_REPLICATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str
    backend: str
    tokens_per_block: int
    bytes_per_page_padded: int
    block_stride_multiple_bytes: int
    block_stride_multiple_tokens: int
    quantisation: str
    num_head_slots: int
    bytes_per_state_packed: int
    tokens_per_state: int
    states_per_token: int
    tensor_shards_max: int
    is_context_sharded: bool
    window_tokens: int
    chunk_tokens: int
    is_causal: bool
    sink_tokens: int
    retained_window_tokens: int
    retained_tokens: int
    packed_format: str
    page_multiple_bytes: int
    model_version: str
    role: str
    leads_index_group: bool
    decodes_several_tokens: bool
    is_replayed: bool
    shapes: _containers.RepeatedCompositeFieldContainer[Shape]
    dtypes: _containers.RepeatedScalarFieldContainer[str]
    num_speculative_blocks: int
    num_checkpoint_blocks: int
    checkpoint_multiple_tokens: int
    is_replicated: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., head_size_v: _Optional[int] = ..., dtype: _Optional[str] = ..., backend: _Optional[str] = ..., tokens_per_block: _Optional[int] = ..., bytes_per_page_padded: _Optional[int] = ..., block_stride_multiple_bytes: _Optional[int] = ..., block_stride_multiple_tokens: _Optional[int] = ..., quantisation: _Optional[str] = ..., num_head_slots: _Optional[int] = ..., bytes_per_state_packed: _Optional[int] = ..., tokens_per_state: _Optional[int] = ..., states_per_token: _Optional[int] = ..., tensor_shards_max: _Optional[int] = ..., is_context_sharded: _Optional[bool] = ..., window_tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., is_causal: _Optional[bool] = ..., sink_tokens: _Optional[int] = ..., retained_window_tokens: _Optional[int] = ..., retained_tokens: _Optional[int] = ..., packed_format: _Optional[str] = ..., page_multiple_bytes: _Optional[int] = ..., model_version: _Optional[str] = ..., role: _Optional[str] = ..., leads_index_group: _Optional[bool] = ..., decodes_several_tokens: _Optional[bool] = ..., is_replayed: _Optional[bool] = ..., shapes: _Optional[_Iterable[_Union[Shape, _Mapping]]] = ..., dtypes: _Optional[_Iterable[str]] = ..., num_speculative_blocks: _Optional[int] = ..., num_checkpoint_blocks: _Optional[int] = ..., checkpoint_multiple_tokens: _Optional[int] = ..., is_replicated: _Optional[bool] = ...) -> None: ...

class RankInputs(_message.Message):
    __slots__ = ("device_bytes", "layers", "keeps_nothing")
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_NOTHING_FIELD_NUMBER: _ClassVar[int]
    device_bytes: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerSpec]
    keeps_nothing: bool
    def __init__(self, device_bytes: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerSpec, _Mapping]]] = ..., keeps_nothing: _Optional[bool] = ...) -> None: ...

class ParallelInputs(_message.Message):
    __slots__ = ("tensor_ranks", "pipeline_ranks", "context_ranks")
    TENSOR_RANKS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_RANKS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_RANKS_FIELD_NUMBER: _ClassVar[int]
    tensor_ranks: int
    pipeline_ranks: int
    context_ranks: int
    def __init__(self, tensor_ranks: _Optional[int] = ..., pipeline_ranks: _Optional[int] = ..., context_ranks: _Optional[int] = ...) -> None: ...

class EngineInputs(_message.Message):
    __slots__ = ("tokens_per_step", "steps_in_flight", "lookahead_tokens", "encoder_tokens_max", "state_mode", "prefix_caching", "has_connector", "match_tokens", "one_group", "drafts_with_last_layer")
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    STATE_MODE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    HAS_CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    MATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ONE_GROUP_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_WITH_LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    tokens_per_step: int
    steps_in_flight: int
    lookahead_tokens: int
    encoder_tokens_max: int
    state_mode: str
    prefix_caching: bool
    has_connector: bool
    match_tokens: int
    one_group: bool
    drafts_with_last_layer: bool
    def __init__(self, tokens_per_step: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., lookahead_tokens: _Optional[int] = ..., encoder_tokens_max: _Optional[int] = ..., state_mode: _Optional[str] = ..., prefix_caching: _Optional[bool] = ..., has_connector: _Optional[bool] = ..., match_tokens: _Optional[int] = ..., one_group: _Optional[bool] = ..., drafts_with_last_layer: _Optional[bool] = ...) -> None: ...

class BackendInputs(_message.Message):
    __slots__ = ("name", "exact_tokens", "multiples_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXACT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MULTIPLES_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    exact_tokens: _containers.RepeatedScalarFieldContainer[int]
    multiples_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., exact_tokens: _Optional[_Iterable[int]] = ..., multiples_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class PlanInputs(_message.Message):
    __slots__ = ("layers", "model_config", "kv_dtype", "tokens_per_block", "device_bytes", "device_blocks", "host_bytes", "longest_request_tokens", "model_digest", "layout", "null_blocks", "block_multiple_bytes", "disk_bytes", "remote_bytes", "blocks_per_slot", "slot_multiple_bytes", "fit_longest_request", "engine", "parallel", "ranks", "backends")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    LONGEST_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NULL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_MULTIPLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    REMOTE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_MULTIPLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIT_LONGEST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerSpec]
    model_config: str
    kv_dtype: str
    tokens_per_block: int
    device_bytes: int
    device_blocks: int
    host_bytes: int
    longest_request_tokens: int
    model_digest: str
    layout: str
    null_blocks: int
    block_multiple_bytes: int
    disk_bytes: int
    remote_bytes: int
    blocks_per_slot: int
    slot_multiple_bytes: int
    fit_longest_request: bool
    engine: EngineInputs
    parallel: ParallelInputs
    ranks: _containers.RepeatedCompositeFieldContainer[RankInputs]
    backends: _containers.RepeatedCompositeFieldContainer[BackendInputs]
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerSpec, _Mapping]]] = ..., model_config: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., tokens_per_block: _Optional[int] = ..., device_bytes: _Optional[int] = ..., device_blocks: _Optional[int] = ..., host_bytes: _Optional[int] = ..., longest_request_tokens: _Optional[int] = ..., model_digest: _Optional[str] = ..., layout: _Optional[str] = ..., null_blocks: _Optional[int] = ..., block_multiple_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., remote_bytes: _Optional[int] = ..., blocks_per_slot: _Optional[int] = ..., slot_multiple_bytes: _Optional[int] = ..., fit_longest_request: _Optional[bool] = ..., engine: _Optional[_Union[EngineInputs, _Mapping]] = ..., parallel: _Optional[_Union[ParallelInputs, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankInputs, _Mapping]]] = ..., backends: _Optional[_Iterable[_Union[BackendInputs, _Mapping]]] = ...) -> None: ...

class LayerPlacement(_message.Message):
    __slots__ = ("name", "group", "offset_bytes", "bytes_per_page", "spec", "block_stride_bytes", "head_stride_bytes", "state_stride_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    group: int
    offset_bytes: int
    bytes_per_page: int
    spec: LayerSpec
    block_stride_bytes: int
    head_stride_bytes: int
    state_stride_bytes: int
    def __init__(self, name: _Optional[str] = ..., group: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., bytes_per_page: _Optional[int] = ..., spec: _Optional[_Union[LayerSpec, _Mapping]] = ..., block_stride_bytes: _Optional[int] = ..., head_stride_bytes: _Optional[int] = ..., state_stride_bytes: _Optional[int] = ...) -> None: ...

class TensorPlan(_message.Message):
    __slots__ = ("group", "layer_names", "offset_bytes", "layer_stride_bytes", "block_stride_bytes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_NAMES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    group: int
    layer_names: _containers.RepeatedScalarFieldContainer[str]
    offset_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int
    def __init__(self, group: _Optional[int] = ..., layer_names: _Optional[_Iterable[str]] = ..., offset_bytes: _Optional[int] = ..., layer_stride_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("offset_bytes", "block_stride_bytes", "num_bytes", "slot_offset_bytes")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    block_stride_bytes: int
    num_bytes: int
    slot_offset_bytes: int
    def __init__(self, offset_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., num_bytes: _Optional[int] = ..., slot_offset_bytes: _Optional[int] = ...) -> None: ...

class RankPlan(_message.Message):
    __slots__ = ("rank", "bytes_per_block", "device_bytes", "bytes_per_longest_request", "layers", "tensors", "extents", "slot_cell_offset_bytes", "slot_cell_bytes", "needs_scrub")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_LONGEST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_CELL_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_CELL_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEEDS_SCRUB_FIELD_NUMBER: _ClassVar[int]
    rank: int
    bytes_per_block: int
    device_bytes: int
    bytes_per_longest_request: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlacement]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorPlan]
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    slot_cell_offset_bytes: int
    slot_cell_bytes: int
    needs_scrub: bool
    def __init__(self, rank: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., device_bytes: _Optional[int] = ..., bytes_per_longest_request: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerPlacement, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[TensorPlan, _Mapping]]] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., slot_cell_offset_bytes: _Optional[int] = ..., slot_cell_bytes: _Optional[int] = ..., needs_scrub: _Optional[bool] = ...) -> None: ...

class GroupPlan(_message.Message):
    __slots__ = ("spec", "layer_names", "tokens_per_block", "bytes_per_page", "has_equal_layers", "blocks_per_longest_request", "table_blocks", "kernel_tokens_per_block", "kernel_blocks_per_block", "kernel_block_stride", "is_prefix_cacheable", "is_context_sharded", "is_drafted")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LAYER_NAMES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    HAS_EQUAL_LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_LONGEST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    TABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    KERNEL_BLOCKS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    KERNEL_BLOCK_STRIDE_FIELD_NUMBER: _ClassVar[int]
    IS_PREFIX_CACHEABLE_FIELD_NUMBER: _ClassVar[int]
    IS_CONTEXT_SHARDED_FIELD_NUMBER: _ClassVar[int]
    IS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    spec: LayerSpec
    layer_names: _containers.RepeatedScalarFieldContainer[str]
    tokens_per_block: int
    bytes_per_page: int
    has_equal_layers: bool
    blocks_per_longest_request: int
    table_blocks: int
    kernel_tokens_per_block: int
    kernel_blocks_per_block: int
    kernel_block_stride: int
    is_prefix_cacheable: bool
    is_context_sharded: bool
    is_drafted: bool
    def __init__(self, spec: _Optional[_Union[LayerSpec, _Mapping]] = ..., layer_names: _Optional[_Iterable[str]] = ..., tokens_per_block: _Optional[int] = ..., bytes_per_page: _Optional[int] = ..., has_equal_layers: _Optional[bool] = ..., blocks_per_longest_request: _Optional[int] = ..., table_blocks: _Optional[int] = ..., kernel_tokens_per_block: _Optional[int] = ..., kernel_blocks_per_block: _Optional[int] = ..., kernel_block_stride: _Optional[int] = ..., is_prefix_cacheable: _Optional[bool] = ..., is_context_sharded: _Optional[bool] = ..., is_drafted: _Optional[bool] = ...) -> None: ...

class Waste(_message.Message):
    __slots__ = ("cause", "tier", "num_bytes", "why")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    cause: str
    tier: str
    num_bytes: int
    why: str
    def __init__(self, cause: _Optional[str] = ..., tier: _Optional[str] = ..., num_bytes: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class CachePlan(_message.Message):
    __slots__ = ("layout_fingerprint", "tokens_per_block", "num_blocks", "num_slots", "longest_request_tokens", "blocks_per_longest_request", "capacity_tokens", "model_digest", "layout", "null_blocks", "hash_block_tokens", "scheduler_block_tokens", "hit_alignment_tokens", "groups", "ranks", "tensor_replicas", "blocks_per_slot", "bytes_per_slot", "num_disk_slots", "num_remote_slots", "waste", "context_ranks")
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_LONGEST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NULL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HASH_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_ALIGNMENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOTE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WASTE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_RANKS_FIELD_NUMBER: _ClassVar[int]
    layout_fingerprint: str
    tokens_per_block: int
    num_blocks: int
    num_slots: int
    longest_request_tokens: int
    blocks_per_longest_request: int
    capacity_tokens: int
    model_digest: str
    layout: str
    null_blocks: int
    hash_block_tokens: int
    scheduler_block_tokens: int
    hit_alignment_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupPlan]
    ranks: _containers.RepeatedCompositeFieldContainer[RankPlan]
    tensor_replicas: int
    blocks_per_slot: int
    bytes_per_slot: int
    num_disk_slots: int
    num_remote_slots: int
    waste: _containers.RepeatedCompositeFieldContainer[Waste]
    context_ranks: int
    def __init__(self, layout_fingerprint: _Optional[str] = ..., tokens_per_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_slots: _Optional[int] = ..., longest_request_tokens: _Optional[int] = ..., blocks_per_longest_request: _Optional[int] = ..., capacity_tokens: _Optional[int] = ..., model_digest: _Optional[str] = ..., layout: _Optional[str] = ..., null_blocks: _Optional[int] = ..., hash_block_tokens: _Optional[int] = ..., scheduler_block_tokens: _Optional[int] = ..., hit_alignment_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupPlan, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankPlan, _Mapping]]] = ..., tensor_replicas: _Optional[int] = ..., blocks_per_slot: _Optional[int] = ..., bytes_per_slot: _Optional[int] = ..., num_disk_slots: _Optional[int] = ..., num_remote_slots: _Optional[int] = ..., waste: _Optional[_Iterable[_Union[Waste, _Mapping]]] = ..., context_ranks: _Optional[int] = ...) -> None: ...

class Equation(_message.Message):
    __slots__ = ("name", "groups", "ranks", "layer", "formula", "arithmetic", "value", "value_divisor", "unit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FORMULA_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIVISOR_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    groups: _containers.RepeatedScalarFieldContainer[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    layer: str
    formula: str
    arithmetic: str
    value: int
    value_divisor: int
    unit: str
    def __init__(self, name: _Optional[str] = ..., groups: _Optional[_Iterable[int]] = ..., ranks: _Optional[_Iterable[int]] = ..., layer: _Optional[str] = ..., formula: _Optional[str] = ..., arithmetic: _Optional[str] = ..., value: _Optional[int] = ..., value_divisor: _Optional[int] = ..., unit: _Optional[str] = ...) -> None: ...

class PlanReport(_message.Message):
    __slots__ = ("equations", "notes")
    EQUATIONS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    equations: _containers.RepeatedCompositeFieldContainer[Equation]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, equations: _Optional[_Iterable[_Union[Equation, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class PlanOutcome(_message.Message):
    __slots__ = ("bytes_per_block", "num_blocks", "usable_blocks", "blocks_per_longest_request", "longest_request_tokens", "largest_request_tokens", "capacity_tokens", "num_slots", "refusal", "bytes_per_slot", "num_disk_slots", "num_remote_slots")
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_LONGEST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    LONGEST_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOTE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    bytes_per_block: int
    num_blocks: int
    usable_blocks: int
    blocks_per_longest_request: int
    longest_request_tokens: int
    largest_request_tokens: int
    capacity_tokens: int
    num_slots: int
    refusal: str
    bytes_per_slot: int
    num_disk_slots: int
    num_remote_slots: int
    def __init__(self, bytes_per_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., usable_blocks: _Optional[int] = ..., blocks_per_longest_request: _Optional[int] = ..., longest_request_tokens: _Optional[int] = ..., largest_request_tokens: _Optional[int] = ..., capacity_tokens: _Optional[int] = ..., num_slots: _Optional[int] = ..., refusal: _Optional[str] = ..., bytes_per_slot: _Optional[int] = ..., num_disk_slots: _Optional[int] = ..., num_remote_slots: _Optional[int] = ...) -> None: ...

class WhatIf(_message.Message):
    __slots__ = ("change", "before", "after")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    change: str
    before: PlanOutcome
    after: PlanOutcome
    def __init__(self, change: _Optional[str] = ..., before: _Optional[_Union[PlanOutcome, _Mapping]] = ..., after: _Optional[_Union[PlanOutcome, _Mapping]] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("inputs", "report", "what_if")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    WHAT_IF_FIELD_NUMBER: _ClassVar[int]
    inputs: PlanInputs
    report: bool
    what_if: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, inputs: _Optional[_Union[PlanInputs, _Mapping]] = ..., report: _Optional[bool] = ..., what_if: _Optional[_Iterable[str]] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("plan", "report", "what_ifs")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    WHAT_IFS_FIELD_NUMBER: _ClassVar[int]
    plan: CachePlan
    report: PlanReport
    what_ifs: _containers.RepeatedCompositeFieldContainer[WhatIf]
    def __init__(self, plan: _Optional[_Union[CachePlan, _Mapping]] = ..., report: _Optional[_Union[PlanReport, _Mapping]] = ..., what_ifs: _Optional[_Iterable[_Union[WhatIf, _Mapping]]] = ...) -> None: ...

class CacheInfo(_message.Message):
    __slots__ = ("cache", "status", "bytes_populated", "num_workers", "plan", "options", "tiers", "is_draining", "longest_request_tokens")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BYTES_POPULATED_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    LONGEST_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cache: str
    status: str
    bytes_populated: int
    num_workers: int
    plan: CachePlan
    options: CacheOptions
    tiers: _containers.RepeatedCompositeFieldContainer[TierInfo]
    is_draining: bool
    longest_request_tokens: int
    def __init__(self, cache: _Optional[str] = ..., status: _Optional[str] = ..., bytes_populated: _Optional[int] = ..., num_workers: _Optional[int] = ..., plan: _Optional[_Union[CachePlan, _Mapping]] = ..., options: _Optional[_Union[CacheOptions, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[TierInfo, _Mapping]]] = ..., is_draining: _Optional[bool] = ..., longest_request_tokens: _Optional[int] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("integrity", "write_policy", "write_after_hits", "eviction_policy", "ghosts")
    INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    WRITE_POLICY_FIELD_NUMBER: _ClassVar[int]
    WRITE_AFTER_HITS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    GHOSTS_FIELD_NUMBER: _ClassVar[int]
    integrity: str
    write_policy: str
    write_after_hits: int
    eviction_policy: str
    ghosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, integrity: _Optional[str] = ..., write_policy: _Optional[str] = ..., write_after_hits: _Optional[int] = ..., eviction_policy: _Optional[str] = ..., ghosts: _Optional[_Iterable[str]] = ...) -> None: ...

class TierInfo(_message.Message):
    __slots__ = ("tier", "status", "reason", "num_slots", "num_found")
    TIER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUND_FIELD_NUMBER: _ClassVar[int]
    tier: str
    status: str
    reason: str
    num_slots: int
    num_found: int
    def __init__(self, tier: _Optional[str] = ..., status: _Optional[str] = ..., reason: _Optional[str] = ..., num_slots: _Optional[int] = ..., num_found: _Optional[int] = ...) -> None: ...

class RegisterCacheRequest(_message.Message):
    __slots__ = ("cache", "inputs", "options")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    cache: str
    inputs: PlanInputs
    options: CacheOptions
    def __init__(self, cache: _Optional[str] = ..., inputs: _Optional[_Union[PlanInputs, _Mapping]] = ..., options: _Optional[_Union[CacheOptions, _Mapping]] = ...) -> None: ...

class RegisterCacheResponse(_message.Message):
    __slots__ = ("info", "created")
    INFO_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    info: CacheInfo
    created: bool
    def __init__(self, info: _Optional[_Union[CacheInfo, _Mapping]] = ..., created: _Optional[bool] = ...) -> None: ...

class GetCacheRequest(_message.Message):
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: str
    def __init__(self, cache: _Optional[str] = ...) -> None: ...

class GetCacheResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: CacheInfo
    def __init__(self, info: _Optional[_Union[CacheInfo, _Mapping]] = ...) -> None: ...

class ListCachesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCachesResponse(_message.Message):
    __slots__ = ("caches",)
    CACHES_FIELD_NUMBER: _ClassVar[int]
    caches: _containers.RepeatedCompositeFieldContainer[CacheInfo]
    def __init__(self, caches: _Optional[_Iterable[_Union[CacheInfo, _Mapping]]] = ...) -> None: ...

class DeleteCacheRequest(_message.Message):
    __slots__ = ("cache", "purge")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PURGE_FIELD_NUMBER: _ClassVar[int]
    cache: str
    purge: bool
    def __init__(self, cache: _Optional[str] = ..., purge: _Optional[bool] = ...) -> None: ...

class DeleteCacheResponse(_message.Message):
    __slots__ = ("num_pins", "keeps_disk", "keeps_remote")
    NUM_PINS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_DISK_FIELD_NUMBER: _ClassVar[int]
    KEEPS_REMOTE_FIELD_NUMBER: _ClassVar[int]
    num_pins: int
    keeps_disk: bool
    keeps_remote: bool
    def __init__(self, num_pins: _Optional[int] = ..., keeps_disk: _Optional[bool] = ..., keeps_remote: _Optional[bool] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("kind", "region_bytes", "read_only", "device_uuid", "mapped_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    region_bytes: int
    read_only: bool
    device_uuid: str
    mapped_bytes: int
    def __init__(self, kind: _Optional[str] = ..., region_bytes: _Optional[int] = ..., read_only: _Optional[bool] = ..., device_uuid: _Optional[str] = ..., mapped_bytes: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("cache", "worker_name", "rank", "tenant", "resume_token", "lease_ids", "layout_fingerprint", "engine", "magazine", "wants_key_counts")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    WORKER_NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MAGAZINE_FIELD_NUMBER: _ClassVar[int]
    WANTS_KEY_COUNTS_FIELD_NUMBER: _ClassVar[int]
    cache: str
    worker_name: str
    rank: int
    tenant: str
    resume_token: str
    lease_ids: bytes
    layout_fingerprint: str
    engine: str
    magazine: str
    wants_key_counts: bool
    def __init__(self, cache: _Optional[str] = ..., worker_name: _Optional[str] = ..., rank: _Optional[int] = ..., tenant: _Optional[str] = ..., resume_token: _Optional[str] = ..., lease_ids: _Optional[bytes] = ..., layout_fingerprint: _Optional[str] = ..., engine: _Optional[str] = ..., magazine: _Optional[str] = ..., wants_key_counts: _Optional[bool] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("worker_id", "token", "epoch", "tenant_key", "info", "regions", "heartbeat_seconds", "lease_seconds", "lease_ids", "death_proof")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TENANT_KEY_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    DEATH_PROOF_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    token: str
    epoch: int
    tenant_key: bytes
    info: CacheInfo
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    heartbeat_seconds: float
    lease_seconds: float
    lease_ids: bytes
    death_proof: str
    def __init__(self, worker_id: _Optional[int] = ..., token: _Optional[str] = ..., epoch: _Optional[int] = ..., tenant_key: _Optional[bytes] = ..., info: _Optional[_Union[CacheInfo, _Mapping]] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., heartbeat_seconds: _Optional[float] = ..., lease_seconds: _Optional[float] = ..., lease_ids: _Optional[bytes] = ..., death_proof: _Optional[str] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("worker_id", "force")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    force: bool
    def __init__(self, worker_id: _Optional[int] = ..., force: _Optional[bool] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ("num_leases",)
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    num_leases: int
    def __init__(self, num_leases: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("lease_ids", "newest_lease_id")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_ids: bytes
    newest_lease_id: int
    def __init__(self, lease_ids: _Optional[bytes] = ..., newest_lease_id: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("unknown_lease_ids", "num_orphans_ended", "newest_lease_id")
    UNKNOWN_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ORPHANS_ENDED_FIELD_NUMBER: _ClassVar[int]
    NEWEST_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    unknown_lease_ids: bytes
    num_orphans_ended: int
    newest_lease_id: int
    def __init__(self, unknown_lease_ids: _Optional[bytes] = ..., num_orphans_ended: _Optional[int] = ..., newest_lease_id: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "keys", "num_tokens", "wait_ms", "token_ids", "priority", "retain_seconds", "explain", "retain_priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    RETAIN_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    keys: bytes
    num_tokens: int
    wait_ms: int
    token_ids: bytes
    priority: str
    retain_seconds: int
    explain: bool
    retain_priority: int
    def __init__(self, request_id: _Optional[str] = ..., keys: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., wait_ms: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., priority: _Optional[str] = ..., retain_seconds: _Optional[int] = ..., explain: _Optional[bool] = ..., retain_priority: _Optional[int] = ...) -> None: ...

class Miss(_message.Message):
    __slots__ = ("first_block", "num_blocks", "reason", "tier", "policy", "tenant", "age_ms", "why")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    num_blocks: int
    reason: str
    tier: str
    policy: str
    tenant: str
    age_ms: int
    why: str
    def __init__(self, first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., reason: _Optional[str] = ..., tier: _Optional[str] = ..., policy: _Optional[str] = ..., tenant: _Optional[str] = ..., age_ms: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("lease_id", "cache")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    cache: str
    def __init__(self, lease_id: _Optional[int] = ..., cache: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("lease_id", "num_tokens", "hit_tokens", "misses")
    class HitTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    num_tokens: int
    hit_tokens: _containers.ScalarMap[str, int]
    misses: _containers.RepeatedCompositeFieldContainer[Miss]
    def __init__(self, lease_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., hit_tokens: _Optional[_Mapping[str, int]] = ..., misses: _Optional[_Iterable[_Union[Miss, _Mapping]]] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: str
    def __init__(self, cache: _Optional[str] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("timestamp_ms", "input_tokens", "output_tokens", "key_digests", "tokens_per_key", "hit_tokens", "num_dropped")
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEY_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_KEY_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    key_digests: bytes
    tokens_per_key: int
    hit_tokens: int
    num_dropped: int
    def __init__(self, timestamp_ms: _Optional[int] = ..., input_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., key_digests: _Optional[bytes] = ..., tokens_per_key: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., num_dropped: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("lease_id", "block_ids", "device_hit_tokens", "host_hit_tokens", "row", "num_blocks", "covered_tokens", "joined_id", "disk_hit_tokens", "remote_hit_tokens", "misses")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JOINED_ID_FIELD_NUMBER: _ClassVar[int]
    DISK_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    block_ids: bytes
    device_hit_tokens: int
    host_hit_tokens: int
    row: int
    num_blocks: bytes
    covered_tokens: int
    joined_id: int
    disk_hit_tokens: int
    remote_hit_tokens: int
    misses: _containers.RepeatedCompositeFieldContainer[Miss]
    def __init__(self, lease_id: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., device_hit_tokens: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ..., row: _Optional[int] = ..., num_blocks: _Optional[bytes] = ..., covered_tokens: _Optional[int] = ..., joined_id: _Optional[int] = ..., disk_hit_tokens: _Optional[int] = ..., remote_hit_tokens: _Optional[int] = ..., misses: _Optional[_Iterable[_Union[Miss, _Mapping]]] = ...) -> None: ...

class MapRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class MapResponse(_message.Message):
    __slots__ = ("row", "num_kernel_blocks", "kernel_blocks")
    ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_KERNEL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    row: int
    num_kernel_blocks: int
    kernel_blocks: bytes
    def __init__(self, row: _Optional[int] = ..., num_kernel_blocks: _Optional[int] = ..., kernel_blocks: _Optional[bytes] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("lease_id", "num_tokens", "wait_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    num_tokens: int
    wait_ms: int
    def __init__(self, lease_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class ExtendResponse(_message.Message):
    __slots__ = ("block_ids", "num_blocks", "covered_tokens", "num_places")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACES_FIELD_NUMBER: _ClassVar[int]
    block_ids: bytes
    num_blocks: bytes
    covered_tokens: int
    num_places: bytes
    def __init__(self, block_ids: _Optional[bytes] = ..., num_blocks: _Optional[bytes] = ..., covered_tokens: _Optional[int] = ..., num_places: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("lease_id", "num_tokens", "first_block", "keys")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    num_tokens: int
    first_block: int
    keys: bytes
    def __init__(self, lease_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_block: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("num_committed", "num_duplicates", "num_given_back")
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    NUM_GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    num_committed: int
    num_duplicates: int
    num_given_back: int
    def __init__(self, num_committed: _Optional[int] = ..., num_duplicates: _Optional[int] = ..., num_given_back: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("lease_id", "keys", "num_blocks", "wait_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    keys: bytes
    num_blocks: int
    wait_ms: int
    def __init__(self, lease_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("num_evicted", "num_offloaded")
    NUM_EVICTED_FIELD_NUMBER: _ClassVar[int]
    NUM_OFFLOADED_FIELD_NUMBER: _ClassVar[int]
    num_evicted: int
    num_offloaded: int
    def __init__(self, num_evicted: _Optional[int] = ..., num_offloaded: _Optional[int] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ("lease_id", "keys", "wait_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    keys: bytes
    wait_ms: int
    def __init__(self, lease_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("block_ids", "num_reloaded", "num_tokens", "row", "num_blocks")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_RELOADED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    block_ids: bytes
    num_reloaded: int
    num_tokens: int
    row: int
    num_blocks: bytes
    def __init__(self, block_ids: _Optional[bytes] = ..., num_reloaded: _Optional[int] = ..., num_tokens: _Optional[int] = ..., row: _Optional[int] = ..., num_blocks: _Optional[bytes] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("lease_id", "request_id", "num_tokens", "wait_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    request_id: str
    num_tokens: int
    wait_ms: int
    def __init__(self, lease_id: _Optional[int] = ..., request_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("lease", "num_shared", "num_copied")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIED_FIELD_NUMBER: _ClassVar[int]
    lease: ReserveResponse
    num_shared: int
    num_copied: int
    def __init__(self, lease: _Optional[_Union[ReserveResponse, _Mapping]] = ..., num_shared: _Optional[int] = ..., num_copied: _Optional[int] = ...) -> None: ...

class TrimRequest(_message.Message):
    __slots__ = ("lease_id", "num_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    num_tokens: int
    def __init__(self, lease_id: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TrimResponse(_message.Message):
    __slots__ = ("num_given_back",)
    NUM_GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    num_given_back: int
    def __init__(self, num_given_back: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("num_device_blocks", "num_host_blocks", "hit_tokens", "num_disk_blocks")
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_device_blocks: int
    num_host_blocks: int
    hit_tokens: int
    num_disk_blocks: int
    def __init__(self, num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., num_disk_blocks: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pin_id", "num_blocks")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    num_blocks: int
    def __init__(self, pin_id: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pin_id",)
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    def __init__(self, pin_id: _Optional[int] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("verbs", "lease_ids", "num_tokens", "num_keys", "first_blocks", "keys", "reserves")
    VERBS_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RESERVES_FIELD_NUMBER: _ClassVar[int]
    verbs: bytes
    lease_ids: bytes
    num_tokens: bytes
    num_keys: bytes
    first_blocks: bytes
    keys: bytes
    reserves: _containers.RepeatedCompositeFieldContainer[ReserveRequest]
    def __init__(self, verbs: _Optional[bytes] = ..., lease_ids: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., num_keys: _Optional[bytes] = ..., first_blocks: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., reserves: _Optional[_Iterable[_Union[ReserveRequest, _Mapping]]] = ...) -> None: ...

class StepError(_message.Message):
    __slots__ = ("index", "error")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    index: int
    error: Error
    def __init__(self, index: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class StepReserve(_message.Message):
    __slots__ = ("granted", "error")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    granted: ReserveResponse
    error: Error
    def __init__(self, granted: _Optional[_Union[ReserveResponse, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("codes", "num_blocks", "block_ids", "reserves", "errors", "num_places")
    CODES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    RESERVES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACES_FIELD_NUMBER: _ClassVar[int]
    codes: bytes
    num_blocks: bytes
    block_ids: bytes
    reserves: _containers.RepeatedCompositeFieldContainer[StepReserve]
    errors: _containers.RepeatedCompositeFieldContainer[StepError]
    num_places: bytes
    def __init__(self, codes: _Optional[bytes] = ..., num_blocks: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., reserves: _Optional[_Iterable[_Union[StepReserve, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[StepError, _Mapping]]] = ..., num_places: _Optional[bytes] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("publish_blocks", "publish_keys", "publish_positions", "retract_blocks", "drop_blocks", "hold_keys", "stops_at_miss", "brings", "holds_all", "take_running", "take_new", "all_or_nothing", "sequence", "missed_keys")
    PUBLISH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_KEYS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    RETRACT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOLD_KEYS_FIELD_NUMBER: _ClassVar[int]
    STOPS_AT_MISS_FIELD_NUMBER: _ClassVar[int]
    BRINGS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_ALL_FIELD_NUMBER: _ClassVar[int]
    TAKE_RUNNING_FIELD_NUMBER: _ClassVar[int]
    TAKE_NEW_FIELD_NUMBER: _ClassVar[int]
    ALL_OR_NOTHING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MISSED_KEYS_FIELD_NUMBER: _ClassVar[int]
    publish_blocks: bytes
    publish_keys: bytes
    publish_positions: bytes
    retract_blocks: bytes
    drop_blocks: bytes
    hold_keys: bytes
    stops_at_miss: bool
    brings: bool
    holds_all: bool
    take_running: int
    take_new: int
    all_or_nothing: bool
    sequence: int
    missed_keys: bytes
    def __init__(self, publish_blocks: _Optional[bytes] = ..., publish_keys: _Optional[bytes] = ..., publish_positions: _Optional[bytes] = ..., retract_blocks: _Optional[bytes] = ..., drop_blocks: _Optional[bytes] = ..., hold_keys: _Optional[bytes] = ..., stops_at_miss: _Optional[bool] = ..., brings: _Optional[bool] = ..., holds_all: _Optional[bool] = ..., take_running: _Optional[int] = ..., take_new: _Optional[int] = ..., all_or_nothing: _Optional[bool] = ..., sequence: _Optional[int] = ..., missed_keys: _Optional[bytes] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("published", "retracted", "dropped", "held_blocks", "held_all_blocks", "held_all_keys", "taken_blocks", "num_taken_running", "num_available", "num_magazines")
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_ALL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_ALL_KEYS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TAKEN_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_MAGAZINES_FIELD_NUMBER: _ClassVar[int]
    published: bytes
    retracted: bytes
    dropped: bytes
    held_blocks: bytes
    held_all_blocks: bytes
    held_all_keys: bytes
    taken_blocks: bytes
    num_taken_running: int
    num_available: int
    num_magazines: int
    def __init__(self, published: _Optional[bytes] = ..., retracted: _Optional[bytes] = ..., dropped: _Optional[bytes] = ..., held_blocks: _Optional[bytes] = ..., held_all_blocks: _Optional[bytes] = ..., held_all_keys: _Optional[bytes] = ..., taken_blocks: _Optional[bytes] = ..., num_taken_running: _Optional[int] = ..., num_available: _Optional[int] = ..., num_magazines: _Optional[int] = ...) -> None: ...

class InventoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InventoryResponse(_message.Message):
    __slots__ = ("blocks", "keys", "sequence")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    keys: bytes
    sequence: int
    def __init__(self, blocks: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., sequence: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("after_sequence", "cache", "with_snapshot")
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    WITH_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    cache: str
    with_snapshot: bool
    def __init__(self, after_sequence: _Optional[int] = ..., cache: _Optional[str] = ..., with_snapshot: _Optional[bool] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("sequence", "kind", "cache", "worker_id", "lease_id", "num_blocks", "unix_nanoseconds", "snapshot", "tenant", "tier")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNIX_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: str
    cache: str
    worker_id: int
    lease_id: int
    num_blocks: int
    unix_nanoseconds: int
    snapshot: CacheStats
    tenant: str
    tier: str
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[str] = ..., cache: _Optional[str] = ..., worker_id: _Optional[int] = ..., lease_id: _Optional[int] = ..., num_blocks: _Optional[int] = ..., unix_nanoseconds: _Optional[int] = ..., snapshot: _Optional[_Union[CacheStats, _Mapping]] = ..., tenant: _Optional[str] = ..., tier: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: str
    def __init__(self, cache: _Optional[str] = ...) -> None: ...

class DrainedCache(_message.Message):
    __slots__ = ("cache", "is_draining", "num_leases", "num_waiting", "num_workers")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    cache: str
    is_draining: bool
    num_leases: int
    num_waiting: int
    num_workers: int
    def __init__(self, cache: _Optional[str] = ..., is_draining: _Optional[bool] = ..., num_leases: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_workers: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("is_daemon_draining", "caches")
    IS_DAEMON_DRAINING_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    is_daemon_draining: bool
    caches: _containers.RepeatedCompositeFieldContainer[DrainedCache]
    def __init__(self, is_daemon_draining: _Optional[bool] = ..., caches: _Optional[_Iterable[_Union[DrainedCache, _Mapping]]] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: str
    def __init__(self, cache: _Optional[str] = ...) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("is_daemon_draining", "caches")
    IS_DAEMON_DRAINING_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    is_daemon_draining: bool
    caches: _containers.RepeatedCompositeFieldContainer[DrainedCache]
    def __init__(self, is_daemon_draining: _Optional[bool] = ..., caches: _Optional[_Iterable[_Union[DrainedCache, _Mapping]]] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("cache", "tenant")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    cache: str
    tenant: str
    def __init__(self, cache: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("num_device", "num_host", "num_disk", "num_held", "lease_ids", "pin_ids", "num_copying", "num_in_magazines", "keeps_remote")
    NUM_DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    PIN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COPYING_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_MAGAZINES_FIELD_NUMBER: _ClassVar[int]
    KEEPS_REMOTE_FIELD_NUMBER: _ClassVar[int]
    num_device: int
    num_host: int
    num_disk: int
    num_held: int
    lease_ids: bytes
    pin_ids: bytes
    num_copying: int
    num_in_magazines: int
    keeps_remote: bool
    def __init__(self, num_device: _Optional[int] = ..., num_host: _Optional[int] = ..., num_disk: _Optional[int] = ..., num_held: _Optional[int] = ..., lease_ids: _Optional[bytes] = ..., pin_ids: _Optional[bytes] = ..., num_copying: _Optional[int] = ..., num_in_magazines: _Optional[int] = ..., keeps_remote: _Optional[bool] = ...) -> None: ...

class ResizeRequest(_message.Message):
    __slots__ = ("cache", "tier", "num_blocks")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    cache: str
    tier: str
    num_blocks: int
    def __init__(self, cache: _Optional[str] = ..., tier: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class ResizeResponse(_message.Message):
    __slots__ = ("num_blocks", "num_parked", "num_evicted", "bytes_given_back")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARKED_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_FIELD_NUMBER: _ClassVar[int]
    BYTES_GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_parked: int
    num_evicted: int
    bytes_given_back: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_parked: _Optional[int] = ..., num_evicted: _Optional[int] = ..., bytes_given_back: _Optional[int] = ...) -> None: ...

class TenantLimits(_message.Message):
    __slots__ = ("min_percent", "min_bytes", "max_percent", "max_bytes", "weight", "pinned_percent_max", "leases_max")
    MIN_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PINNED_PERCENT_MAX_FIELD_NUMBER: _ClassVar[int]
    LEASES_MAX_FIELD_NUMBER: _ClassVar[int]
    min_percent: float
    min_bytes: int
    max_percent: float
    max_bytes: int
    weight: float
    pinned_percent_max: float
    leases_max: int
    def __init__(self, min_percent: _Optional[float] = ..., min_bytes: _Optional[int] = ..., max_percent: _Optional[float] = ..., max_bytes: _Optional[int] = ..., weight: _Optional[float] = ..., pinned_percent_max: _Optional[float] = ..., leases_max: _Optional[int] = ...) -> None: ...

class SetTenantRequest(_message.Message):
    __slots__ = ("tenant", "limits", "revision")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limits: TenantLimits
    revision: int
    def __init__(self, tenant: _Optional[str] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., revision: _Optional[int] = ...) -> None: ...

class SetTenantResponse(_message.Message):
    __slots__ = ("tenant", "limits", "revision")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limits: TenantLimits
    revision: int
    def __init__(self, tenant: _Optional[str] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., revision: _Optional[int] = ...) -> None: ...

class GetTenantRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class GetTenantResponse(_message.Message):
    __slots__ = ("tenant", "limits", "revision")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limits: TenantLimits
    revision: int
    def __init__(self, tenant: _Optional[str] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., revision: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: str
    def __init__(self, cache: _Optional[str] = ...) -> None: ...

class GhostStats(_message.Message):
    __slots__ = ("name", "num_keys", "num_hits")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_keys: int
    num_hits: int
    def __init__(self, name: _Optional[str] = ..., num_keys: _Optional[int] = ..., num_hits: _Optional[int] = ...) -> None: ...

class PoolStats(_message.Message):
    __slots__ = ("tier", "num_blocks", "free", "reserved", "filling", "ready", "ready_held", "quarantined", "scrubbing", "bad", "parked")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    FILLING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    READY_HELD_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    SCRUBBING_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    tier: str
    num_blocks: int
    free: int
    reserved: int
    filling: int
    ready: int
    ready_held: int
    quarantined: int
    scrubbing: int
    bad: int
    parked: int
    def __init__(self, tier: _Optional[str] = ..., num_blocks: _Optional[int] = ..., free: _Optional[int] = ..., reserved: _Optional[int] = ..., filling: _Optional[int] = ..., ready: _Optional[int] = ..., ready_held: _Optional[int] = ..., quarantined: _Optional[int] = ..., scrubbing: _Optional[int] = ..., bad: _Optional[int] = ..., parked: _Optional[int] = ...) -> None: ...

class CacheStats(_message.Message):
    __slots__ = ("cache", "pools", "num_leases", "num_waiting", "num_workers", "counters", "ghosts")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CACHE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    GHOSTS_FIELD_NUMBER: _ClassVar[int]
    cache: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolStats]
    num_leases: int
    num_waiting: int
    num_workers: int
    counters: _containers.ScalarMap[str, int]
    ghosts: _containers.RepeatedCompositeFieldContainer[GhostStats]
    def __init__(self, cache: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolStats, _Mapping]]] = ..., num_leases: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_workers: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., ghosts: _Optional[_Iterable[_Union[GhostStats, _Mapping]]] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("epoch", "caches", "is_draining", "is_stopping")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_STOPPING_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    caches: _containers.RepeatedCompositeFieldContainer[CacheStats]
    is_draining: bool
    is_stopping: bool
    def __init__(self, epoch: _Optional[int] = ..., caches: _Optional[_Iterable[_Union[CacheStats, _Mapping]]] = ..., is_draining: _Optional[bool] = ..., is_stopping: _Optional[bool] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("cache", "what", "limit", "after_id")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_ID_FIELD_NUMBER: _ClassVar[int]
    cache: str
    what: str
    limit: int
    after_id: int
    def __init__(self, cache: _Optional[str] = ..., what: _Optional[str] = ..., limit: _Optional[int] = ..., after_id: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "worker_name", "tenant", "rank", "death_proof", "num_leases", "age_ms", "process_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DEATH_PROOF_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    worker_name: str
    tenant: str
    rank: int
    death_proof: str
    num_leases: int
    age_ms: int
    process_id: int
    def __init__(self, worker_id: _Optional[int] = ..., worker_name: _Optional[str] = ..., tenant: _Optional[str] = ..., rank: _Optional[int] = ..., death_proof: _Optional[str] = ..., num_leases: _Optional[int] = ..., age_ms: _Optional[int] = ..., process_id: _Optional[int] = ...) -> None: ...

class LeaseInfo(_message.Message):
    __slots__ = ("lease_id", "worker_id", "request_digest", "phase", "num_blocks", "num_tokens", "age_ms", "left_ms", "tenant")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    worker_id: int
    request_digest: str
    phase: str
    num_blocks: int
    num_tokens: int
    age_ms: int
    left_ms: int
    tenant: str
    def __init__(self, lease_id: _Optional[int] = ..., worker_id: _Optional[int] = ..., request_digest: _Optional[str] = ..., phase: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_tokens: _Optional[int] = ..., age_ms: _Optional[int] = ..., left_ms: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class PinInfo(_message.Message):
    __slots__ = ("pin_id", "num_blocks", "tenant", "age_ms")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    num_blocks: int
    tenant: str
    age_ms: int
    def __init__(self, pin_id: _Optional[int] = ..., num_blocks: _Optional[int] = ..., tenant: _Optional[str] = ..., age_ms: _Optional[int] = ...) -> None: ...

class WaitingInfo(_message.Message):
    __slots__ = ("call_id", "worker_id", "verb", "position", "priority", "num_blocks", "available_blocks", "reason", "age_ms", "left_ms")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    VERB_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    worker_id: int
    verb: str
    position: int
    priority: str
    num_blocks: int
    available_blocks: int
    reason: str
    age_ms: int
    left_ms: int
    def __init__(self, call_id: _Optional[int] = ..., worker_id: _Optional[int] = ..., verb: _Optional[str] = ..., position: _Optional[int] = ..., priority: _Optional[str] = ..., num_blocks: _Optional[int] = ..., available_blocks: _Optional[int] = ..., reason: _Optional[str] = ..., age_ms: _Optional[int] = ..., left_ms: _Optional[int] = ...) -> None: ...

class TenantInfo(_message.Message):
    __slots__ = ("tenant_id", "tenant", "used_blocks", "held_blocks", "pinned_blocks", "min_blocks", "max_blocks", "pinned_blocks_max", "weight", "num_leases", "leases_max", "revision")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASES_MAX_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    tenant_id: int
    tenant: str
    used_blocks: int
    held_blocks: int
    pinned_blocks: int
    min_blocks: int
    max_blocks: int
    pinned_blocks_max: int
    weight: float
    num_leases: int
    leases_max: int
    revision: int
    def __init__(self, tenant_id: _Optional[int] = ..., tenant: _Optional[str] = ..., used_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., min_blocks: _Optional[int] = ..., max_blocks: _Optional[int] = ..., pinned_blocks_max: _Optional[int] = ..., weight: _Optional[float] = ..., num_leases: _Optional[int] = ..., leases_max: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class MagazineInfo(_message.Message):
    __slots__ = ("magazine_id", "magazine_digest", "tenant", "worker_ids", "private_blocks", "held_blocks", "num_exchanges", "age_ms")
    MAGAZINE_ID_FIELD_NUMBER: _ClassVar[int]
    MAGAZINE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    magazine_id: int
    magazine_digest: str
    tenant: str
    worker_ids: bytes
    private_blocks: int
    held_blocks: int
    num_exchanges: int
    age_ms: int
    def __init__(self, magazine_id: _Optional[int] = ..., magazine_digest: _Optional[str] = ..., tenant: _Optional[str] = ..., worker_ids: _Optional[bytes] = ..., private_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., num_exchanges: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("num_total", "workers", "leases", "pins", "waiting", "tenants", "magazines")
    NUM_TOTAL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    MAGAZINES_FIELD_NUMBER: _ClassVar[int]
    num_total: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseInfo]
    pins: _containers.RepeatedCompositeFieldContainer[PinInfo]
    waiting: _containers.RepeatedCompositeFieldContainer[WaitingInfo]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantInfo]
    magazines: _containers.RepeatedCompositeFieldContainer[MagazineInfo]
    def __init__(self, num_total: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[LeaseInfo, _Mapping]]] = ..., pins: _Optional[_Iterable[_Union[PinInfo, _Mapping]]] = ..., waiting: _Optional[_Iterable[_Union[WaitingInfo, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantInfo, _Mapping]]] = ..., magazines: _Optional[_Iterable[_Union[MagazineInfo, _Mapping]]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retryable", "resource", "need", "available", "limit", "retry_after_ms", "rule", "remedies", "holdings")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    REMEDIES_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    resource: str
    need: int
    available: int
    limit: int
    retry_after_ms: int
    rule: str
    remedies: _containers.RepeatedScalarFieldContainer[str]
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., resource: _Optional[str] = ..., need: _Optional[int] = ..., available: _Optional[int] = ..., limit: _Optional[int] = ..., retry_after_ms: _Optional[int] = ..., rule: _Optional[str] = ..., remedies: _Optional[_Iterable[str]] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("owner", "state", "num_blocks")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    state: str
    num_blocks: int
    def __init__(self, owner: _Optional[str] = ..., state: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("call_number", "epoch", "idempotency_key", "token", "cache", "traceparent", "cancels", "plan", "register_cache", "get_cache", "list_caches", "delete_cache", "attach", "detach", "heartbeat", "reserve", "map", "extend", "commit", "evict", "reload", "release", "lookup", "pin", "unpin", "step", "stats", "watch", "inspect", "fork", "trim", "explain", "trace", "exchange", "inventory", "drain", "undrain", "clear", "resize", "set_tenant", "get_tenant")
    CALL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REGISTER_CACHE_FIELD_NUMBER: _ClassVar[int]
    GET_CACHE_FIELD_NUMBER: _ClassVar[int]
    LIST_CACHES_FIELD_NUMBER: _ClassVar[int]
    DELETE_CACHE_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    RELOAD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    INSPECT_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    TRIM_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    RESIZE_FIELD_NUMBER: _ClassVar[int]
    SET_TENANT_FIELD_NUMBER: _ClassVar[int]
    GET_TENANT_FIELD_NUMBER: _ClassVar[int]
    call_number: int
    epoch: int
    idempotency_key: str
    token: str
    cache: str
    traceparent: str
    cancels: int
    plan: PlanRequest
    register_cache: RegisterCacheRequest
    get_cache: GetCacheRequest
    list_caches: ListCachesRequest
    delete_cache: DeleteCacheRequest
    attach: AttachRequest
    detach: DetachRequest
    heartbeat: HeartbeatRequest
    reserve: ReserveRequest
    map: MapRequest
    extend: ExtendRequest
    commit: CommitRequest
    evict: EvictRequest
    reload: ReloadRequest
    release: ReleaseRequest
    lookup: LookupRequest
    pin: PinRequest
    unpin: UnpinRequest
    step: StepRequest
    stats: StatsRequest
    watch: WatchRequest
    inspect: InspectRequest
    fork: ForkRequest
    trim: TrimRequest
    explain: ExplainRequest
    trace: TraceRequest
    exchange: ExchangeRequest
    inventory: InventoryRequest
    drain: DrainRequest
    undrain: UndrainRequest
    clear: ClearRequest
    resize: ResizeRequest
    set_tenant: SetTenantRequest
    get_tenant: GetTenantRequest
    def __init__(self, call_number: _Optional[int] = ..., epoch: _Optional[int] = ..., idempotency_key: _Optional[str] = ..., token: _Optional[str] = ..., cache: _Optional[str] = ..., traceparent: _Optional[str] = ..., cancels: _Optional[int] = ..., plan: _Optional[_Union[PlanRequest, _Mapping]] = ..., register_cache: _Optional[_Union[RegisterCacheRequest, _Mapping]] = ..., get_cache: _Optional[_Union[GetCacheRequest, _Mapping]] = ..., list_caches: _Optional[_Union[ListCachesRequest, _Mapping]] = ..., delete_cache: _Optional[_Union[DeleteCacheRequest, _Mapping]] = ..., attach: _Optional[_Union[AttachRequest, _Mapping]] = ..., detach: _Optional[_Union[DetachRequest, _Mapping]] = ..., heartbeat: _Optional[_Union[HeartbeatRequest, _Mapping]] = ..., reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., map: _Optional[_Union[MapRequest, _Mapping]] = ..., extend: _Optional[_Union[ExtendRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ..., evict: _Optional[_Union[EvictRequest, _Mapping]] = ..., reload: _Optional[_Union[ReloadRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., pin: _Optional[_Union[PinRequest, _Mapping]] = ..., unpin: _Optional[_Union[UnpinRequest, _Mapping]] = ..., step: _Optional[_Union[StepRequest, _Mapping]] = ..., stats: _Optional[_Union[StatsRequest, _Mapping]] = ..., watch: _Optional[_Union[WatchRequest, _Mapping]] = ..., inspect: _Optional[_Union[InspectRequest, _Mapping]] = ..., fork: _Optional[_Union[ForkRequest, _Mapping]] = ..., trim: _Optional[_Union[TrimRequest, _Mapping]] = ..., explain: _Optional[_Union[ExplainRequest, _Mapping]] = ..., trace: _Optional[_Union[TraceRequest, _Mapping]] = ..., exchange: _Optional[_Union[ExchangeRequest, _Mapping]] = ..., inventory: _Optional[_Union[InventoryRequest, _Mapping]] = ..., drain: _Optional[_Union[DrainRequest, _Mapping]] = ..., undrain: _Optional[_Union[UndrainRequest, _Mapping]] = ..., clear: _Optional[_Union[ClearRequest, _Mapping]] = ..., resize: _Optional[_Union[ResizeRequest, _Mapping]] = ..., set_tenant: _Optional[_Union[SetTenantRequest, _Mapping]] = ..., get_tenant: _Optional[_Union[GetTenantRequest, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("call_number", "epoch", "error", "plan", "register_cache", "get_cache", "list_caches", "delete_cache", "attach", "detach", "heartbeat", "reserve", "map", "extend", "commit", "evict", "reload", "release", "lookup", "pin", "unpin", "step", "stats", "watch", "inspect", "fork", "trim", "explain", "trace", "exchange", "inventory", "drain", "undrain", "clear", "resize", "set_tenant", "get_tenant")
    CALL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REGISTER_CACHE_FIELD_NUMBER: _ClassVar[int]
    GET_CACHE_FIELD_NUMBER: _ClassVar[int]
    LIST_CACHES_FIELD_NUMBER: _ClassVar[int]
    DELETE_CACHE_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    RELOAD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    INSPECT_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    TRIM_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    RESIZE_FIELD_NUMBER: _ClassVar[int]
    SET_TENANT_FIELD_NUMBER: _ClassVar[int]
    GET_TENANT_FIELD_NUMBER: _ClassVar[int]
    call_number: int
    epoch: int
    error: Error
    plan: PlanResponse
    register_cache: RegisterCacheResponse
    get_cache: GetCacheResponse
    list_caches: ListCachesResponse
    delete_cache: DeleteCacheResponse
    attach: AttachResponse
    detach: DetachResponse
    heartbeat: HeartbeatResponse
    reserve: ReserveResponse
    map: MapResponse
    extend: ExtendResponse
    commit: CommitResponse
    evict: EvictResponse
    reload: ReloadResponse
    release: ReleaseResponse
    lookup: LookupResponse
    pin: PinResponse
    unpin: UnpinResponse
    step: StepResponse
    stats: StatsResponse
    watch: WatchResponse
    inspect: InspectResponse
    fork: ForkResponse
    trim: TrimResponse
    explain: ExplainResponse
    trace: TraceResponse
    exchange: ExchangeResponse
    inventory: InventoryResponse
    drain: DrainResponse
    undrain: UndrainResponse
    clear: ClearResponse
    resize: ResizeResponse
    set_tenant: SetTenantResponse
    get_tenant: GetTenantResponse
    def __init__(self, call_number: _Optional[int] = ..., epoch: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., plan: _Optional[_Union[PlanResponse, _Mapping]] = ..., register_cache: _Optional[_Union[RegisterCacheResponse, _Mapping]] = ..., get_cache: _Optional[_Union[GetCacheResponse, _Mapping]] = ..., list_caches: _Optional[_Union[ListCachesResponse, _Mapping]] = ..., delete_cache: _Optional[_Union[DeleteCacheResponse, _Mapping]] = ..., attach: _Optional[_Union[AttachResponse, _Mapping]] = ..., detach: _Optional[_Union[DetachResponse, _Mapping]] = ..., heartbeat: _Optional[_Union[HeartbeatResponse, _Mapping]] = ..., reserve: _Optional[_Union[ReserveResponse, _Mapping]] = ..., map: _Optional[_Union[MapResponse, _Mapping]] = ..., extend: _Optional[_Union[ExtendResponse, _Mapping]] = ..., commit: _Optional[_Union[CommitResponse, _Mapping]] = ..., evict: _Optional[_Union[EvictResponse, _Mapping]] = ..., reload: _Optional[_Union[ReloadResponse, _Mapping]] = ..., release: _Optional[_Union[ReleaseResponse, _Mapping]] = ..., lookup: _Optional[_Union[LookupResponse, _Mapping]] = ..., pin: _Optional[_Union[PinResponse, _Mapping]] = ..., unpin: _Optional[_Union[UnpinResponse, _Mapping]] = ..., step: _Optional[_Union[StepResponse, _Mapping]] = ..., stats: _Optional[_Union[StatsResponse, _Mapping]] = ..., watch: _Optional[_Union[WatchResponse, _Mapping]] = ..., inspect: _Optional[_Union[InspectResponse, _Mapping]] = ..., fork: _Optional[_Union[ForkResponse, _Mapping]] = ..., trim: _Optional[_Union[TrimResponse, _Mapping]] = ..., explain: _Optional[_Union[ExplainResponse, _Mapping]] = ..., trace: _Optional[_Union[TraceResponse, _Mapping]] = ..., exchange: _Optional[_Union[ExchangeResponse, _Mapping]] = ..., inventory: _Optional[_Union[InventoryResponse, _Mapping]] = ..., drain: _Optional[_Union[DrainResponse, _Mapping]] = ..., undrain: _Optional[_Union[UndrainResponse, _Mapping]] = ..., clear: _Optional[_Union[ClearResponse, _Mapping]] = ..., resize: _Optional[_Union[ResizeResponse, _Mapping]] = ..., set_tenant: _Optional[_Union[SetTenantResponse, _Mapping]] = ..., get_tenant: _Optional[_Union[GetTenantResponse, _Mapping]] = ...) -> None: ...
