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

class LayerSpec(_message.Message):
    __slots__ = ("name", "kind", "num_kv_heads", "head_size", "head_size_v", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_V_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., head_size_v: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class PlanInputs(_message.Message):
    __slots__ = ("layers", "model_config", "kv_dtype", "tokens_per_block", "device_bytes", "device_blocks", "host_bytes", "longest_request_tokens", "model_digest")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    LONGEST_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerSpec]
    model_config: str
    kv_dtype: str
    tokens_per_block: int
    device_bytes: int
    device_blocks: int
    host_bytes: int
    longest_request_tokens: int
    model_digest: str
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerSpec, _Mapping]]] = ..., model_config: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., tokens_per_block: _Optional[int] = ..., device_bytes: _Optional[int] = ..., device_blocks: _Optional[int] = ..., host_bytes: _Optional[int] = ..., longest_request_tokens: _Optional[int] = ..., model_digest: _Optional[str] = ...) -> None: ...

class LayerPlacement(_message.Message):
    __slots__ = ("name", "group", "offset_bytes", "bytes_per_page", "spec")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    name: str
    group: int
    offset_bytes: int
    bytes_per_page: int
    spec: LayerSpec
    def __init__(self, name: _Optional[str] = ..., group: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., bytes_per_page: _Optional[int] = ..., spec: _Optional[_Union[LayerSpec, _Mapping]] = ...) -> None: ...

class CachePlan(_message.Message):
    __slots__ = ("layout_fingerprint", "tokens_per_block", "bytes_per_token", "bytes_per_block", "num_blocks", "num_slots", "device_bytes", "host_bytes", "longest_request_tokens", "blocks_per_longest_request", "capacity_tokens", "layers", "model_digest")
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    LONGEST_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_LONGEST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    layout_fingerprint: str
    tokens_per_block: int
    bytes_per_token: int
    bytes_per_block: int
    num_blocks: int
    num_slots: int
    device_bytes: int
    host_bytes: int
    longest_request_tokens: int
    blocks_per_longest_request: int
    capacity_tokens: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlacement]
    model_digest: str
    def __init__(self, layout_fingerprint: _Optional[str] = ..., tokens_per_block: _Optional[int] = ..., bytes_per_token: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_slots: _Optional[int] = ..., device_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., longest_request_tokens: _Optional[int] = ..., blocks_per_longest_request: _Optional[int] = ..., capacity_tokens: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerPlacement, _Mapping]]] = ..., model_digest: _Optional[str] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("inputs",)
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    inputs: PlanInputs
    def __init__(self, inputs: _Optional[_Union[PlanInputs, _Mapping]] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: CachePlan
    def __init__(self, plan: _Optional[_Union[CachePlan, _Mapping]] = ...) -> None: ...

class CacheInfo(_message.Message):
    __slots__ = ("cache", "status", "bytes_populated", "num_workers", "plan")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BYTES_POPULATED_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    cache: str
    status: str
    bytes_populated: int
    num_workers: int
    plan: CachePlan
    def __init__(self, cache: _Optional[str] = ..., status: _Optional[str] = ..., bytes_populated: _Optional[int] = ..., num_workers: _Optional[int] = ..., plan: _Optional[_Union[CachePlan, _Mapping]] = ...) -> None: ...

class RegisterCacheRequest(_message.Message):
    __slots__ = ("cache", "inputs", "integrity")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    cache: str
    inputs: PlanInputs
    integrity: str
    def __init__(self, cache: _Optional[str] = ..., inputs: _Optional[_Union[PlanInputs, _Mapping]] = ..., integrity: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: str
    def __init__(self, cache: _Optional[str] = ...) -> None: ...

class DeleteCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Region(_message.Message):
    __slots__ = ("kind", "region_bytes", "read_only")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    region_bytes: int
    read_only: bool
    def __init__(self, kind: _Optional[str] = ..., region_bytes: _Optional[int] = ..., read_only: _Optional[bool] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("cache", "worker_name", "rank", "tenant", "resume_token", "lease_ids", "layout_fingerprint")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    WORKER_NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    cache: str
    worker_name: str
    rank: int
    tenant: str
    resume_token: str
    lease_ids: bytes
    layout_fingerprint: str
    def __init__(self, cache: _Optional[str] = ..., worker_name: _Optional[str] = ..., rank: _Optional[int] = ..., tenant: _Optional[str] = ..., resume_token: _Optional[str] = ..., lease_ids: _Optional[bytes] = ..., layout_fingerprint: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    def __init__(self, worker_id: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("unknown_lease_ids", "num_orphans_ended")
    UNKNOWN_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ORPHANS_ENDED_FIELD_NUMBER: _ClassVar[int]
    unknown_lease_ids: bytes
    num_orphans_ended: int
    def __init__(self, unknown_lease_ids: _Optional[bytes] = ..., num_orphans_ended: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "keys", "num_tokens", "wait_ms", "token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    keys: bytes
    num_tokens: int
    wait_ms: int
    token_ids: bytes
    def __init__(self, request_id: _Optional[str] = ..., keys: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., wait_ms: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("lease_id", "block_ids", "device_hit_tokens", "host_hit_tokens", "row")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    block_ids: bytes
    device_hit_tokens: int
    host_hit_tokens: int
    row: int
    def __init__(self, lease_id: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., device_hit_tokens: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ..., row: _Optional[int] = ...) -> None: ...

class MapRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class MapResponse(_message.Message):
    __slots__ = ("row", "num_kernel_blocks")
    ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_KERNEL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    row: int
    num_kernel_blocks: int
    def __init__(self, row: _Optional[int] = ..., num_kernel_blocks: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: bytes
    def __init__(self, block_ids: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("num_committed", "num_duplicates")
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    num_committed: int
    num_duplicates: int
    def __init__(self, num_committed: _Optional[int] = ..., num_duplicates: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("block_ids", "num_reloaded", "num_tokens", "row")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_RELOADED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    block_ids: bytes
    num_reloaded: int
    num_tokens: int
    row: int
    def __init__(self, block_ids: _Optional[bytes] = ..., num_reloaded: _Optional[int] = ..., num_tokens: _Optional[int] = ..., row: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("num_device_blocks", "num_host_blocks")
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_device_blocks: int
    num_host_blocks: int
    def __init__(self, num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ...) -> None: ...

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

class StepReserve(_message.Message):
    __slots__ = ("granted", "error")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    granted: ReserveResponse
    error: Error
    def __init__(self, granted: _Optional[_Union[ReserveResponse, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("codes", "num_blocks", "block_ids", "reserves")
    CODES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    RESERVES_FIELD_NUMBER: _ClassVar[int]
    codes: bytes
    num_blocks: bytes
    block_ids: bytes
    reserves: _containers.RepeatedCompositeFieldContainer[StepReserve]
    def __init__(self, codes: _Optional[bytes] = ..., num_blocks: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., reserves: _Optional[_Iterable[_Union[StepReserve, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("after_sequence", "cache")
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    cache: str
    def __init__(self, after_sequence: _Optional[int] = ..., cache: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("sequence", "kind", "cache", "worker_id", "lease_id", "num_blocks", "unix_nanoseconds")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNIX_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: str
    cache: str
    worker_id: int
    lease_id: int
    num_blocks: int
    unix_nanoseconds: int
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[str] = ..., cache: _Optional[str] = ..., worker_id: _Optional[int] = ..., lease_id: _Optional[int] = ..., num_blocks: _Optional[int] = ..., unix_nanoseconds: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: str
    def __init__(self, cache: _Optional[str] = ...) -> None: ...

class PoolStats(_message.Message):
    __slots__ = ("tier", "num_blocks", "free", "reserved", "filling", "ready", "ready_held", "quarantined", "scrubbing", "bad")
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
    def __init__(self, tier: _Optional[str] = ..., num_blocks: _Optional[int] = ..., free: _Optional[int] = ..., reserved: _Optional[int] = ..., filling: _Optional[int] = ..., ready: _Optional[int] = ..., ready_held: _Optional[int] = ..., quarantined: _Optional[int] = ..., scrubbing: _Optional[int] = ..., bad: _Optional[int] = ...) -> None: ...

class CacheStats(_message.Message):
    __slots__ = ("cache", "pools", "num_leases", "num_waiting", "num_workers", "counters")
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
    cache: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolStats]
    num_leases: int
    num_waiting: int
    num_workers: int
    counters: _containers.ScalarMap[str, int]
    def __init__(self, cache: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolStats, _Mapping]]] = ..., num_leases: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_workers: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("epoch", "caches")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    caches: _containers.RepeatedCompositeFieldContainer[CacheStats]
    def __init__(self, epoch: _Optional[int] = ..., caches: _Optional[_Iterable[_Union[CacheStats, _Mapping]]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retryable", "resource", "need", "available", "limit", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    resource: str
    need: int
    available: int
    limit: int
    retry_after_ms: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., resource: _Optional[str] = ..., need: _Optional[int] = ..., available: _Optional[int] = ..., limit: _Optional[int] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("call_number", "epoch", "idempotency_key", "token", "cache", "plan", "register_cache", "get_cache", "list_caches", "delete_cache", "attach", "detach", "heartbeat", "reserve", "map", "extend", "commit", "evict", "reload", "release", "lookup", "pin", "unpin", "step", "stats", "watch")
    CALL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
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
    call_number: int
    epoch: int
    idempotency_key: str
    token: str
    cache: str
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
    def __init__(self, call_number: _Optional[int] = ..., epoch: _Optional[int] = ..., idempotency_key: _Optional[str] = ..., token: _Optional[str] = ..., cache: _Optional[str] = ..., plan: _Optional[_Union[PlanRequest, _Mapping]] = ..., register_cache: _Optional[_Union[RegisterCacheRequest, _Mapping]] = ..., get_cache: _Optional[_Union[GetCacheRequest, _Mapping]] = ..., list_caches: _Optional[_Union[ListCachesRequest, _Mapping]] = ..., delete_cache: _Optional[_Union[DeleteCacheRequest, _Mapping]] = ..., attach: _Optional[_Union[AttachRequest, _Mapping]] = ..., detach: _Optional[_Union[DetachRequest, _Mapping]] = ..., heartbeat: _Optional[_Union[HeartbeatRequest, _Mapping]] = ..., reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., map: _Optional[_Union[MapRequest, _Mapping]] = ..., extend: _Optional[_Union[ExtendRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ..., evict: _Optional[_Union[EvictRequest, _Mapping]] = ..., reload: _Optional[_Union[ReloadRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., pin: _Optional[_Union[PinRequest, _Mapping]] = ..., unpin: _Optional[_Union[UnpinRequest, _Mapping]] = ..., step: _Optional[_Union[StepRequest, _Mapping]] = ..., stats: _Optional[_Union[StatsRequest, _Mapping]] = ..., watch: _Optional[_Union[WatchRequest, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("call_number", "epoch", "error", "plan", "register_cache", "get_cache", "list_caches", "delete_cache", "attach", "detach", "heartbeat", "reserve", "map", "extend", "commit", "evict", "reload", "release", "lookup", "pin", "unpin", "step", "stats", "watch")
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
    def __init__(self, call_number: _Optional[int] = ..., epoch: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., plan: _Optional[_Union[PlanResponse, _Mapping]] = ..., register_cache: _Optional[_Union[RegisterCacheResponse, _Mapping]] = ..., get_cache: _Optional[_Union[GetCacheResponse, _Mapping]] = ..., list_caches: _Optional[_Union[ListCachesResponse, _Mapping]] = ..., delete_cache: _Optional[_Union[DeleteCacheResponse, _Mapping]] = ..., attach: _Optional[_Union[AttachResponse, _Mapping]] = ..., detach: _Optional[_Union[DetachResponse, _Mapping]] = ..., heartbeat: _Optional[_Union[HeartbeatResponse, _Mapping]] = ..., reserve: _Optional[_Union[ReserveResponse, _Mapping]] = ..., map: _Optional[_Union[MapResponse, _Mapping]] = ..., extend: _Optional[_Union[ExtendResponse, _Mapping]] = ..., commit: _Optional[_Union[CommitResponse, _Mapping]] = ..., evict: _Optional[_Union[EvictResponse, _Mapping]] = ..., reload: _Optional[_Union[ReloadResponse, _Mapping]] = ..., release: _Optional[_Union[ReleaseResponse, _Mapping]] = ..., lookup: _Optional[_Union[LookupResponse, _Mapping]] = ..., pin: _Optional[_Union[PinResponse, _Mapping]] = ..., unpin: _Optional[_Union[UnpinResponse, _Mapping]] = ..., step: _Optional[_Union[StepResponse, _Mapping]] = ..., stats: _Optional[_Union[StatsResponse, _Mapping]] = ..., watch: _Optional[_Union[WatchResponse, _Mapping]] = ...) -> None: ...
