"""Own the list of vLLM's parts that the connectors build on, and the refusal of a vLLM that lacks any of them."""

import logging
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

_logger: Final = logging.getLogger(__name__)

SUPPORTED_VERSIONS: Final = "0.32"
"""The releases that the connectors are tested with."""

Parts = Mapping[str, tuple[str, ...]]
"""Classes, as module and name, each with its attributes that are called, overridden or read."""

_BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_COMMON: Final[Parts] = {
    "vllm.config:get_current_vllm_config_or_none": (),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": ("register_connector",),
    f"{_BASE}:KVConnectorBase_V1": (
        "bind_kv_cache_manager", "build_connector_meta", "build_connector_worker_meta", "get_num_new_matched_tokens",
        "get_required_kvcache_layout", "handle_preemptions", "has_pending_push_work", "register_kv_caches",
        "requires_kv_delivery", "reset_cache", "update_connector_output", "update_state_after_alloc",
    ),
    f"{_BASE}:KVConnectorMetadata": (),
    f"{_BASE}:KVConnectorWorkerMetadata": ("aggregate",),
    f"{_BASE}:SupportsHMA": ("request_finished_all_groups",),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": ("single_type_managers",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": ("block_pool", "coordinator"),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": ("req_to_blocks",),
    "vllm.v1.kv_cache_interface:KVCacheConfig": (),
    "vllm.v1.kv_cache_interface:KVCacheTensor": (),
    "vllm.v1.outputs:KVConnectorOutput": ("invalid_block_ids",),
}  # fmt: skip
_MEMORY: Final[Parts] = {
    f"{_BASE}:KVConnectorBase_V1": (
        "bind_connector_metadata", "get_handshake_metadata", "get_mem_pool_context",
        "set_xfer_handshake_metadata_pp_aware", "shutdown",
    ),
    f"{_BASE}:KVConnectorHandshakeMetadata": (),
    "vllm.v1.core.block_pool:BlockPool": (
        "blocks", "cache_full_blocks", "cached_block_hash_to_block", "evict_blocks", "free_block_queue", "free_blocks",
        "get_cached_block", "get_new_blocks", "get_num_free_blocks", "get_usage", "reset_prefix_cache", "touch",
        "unpin_blocks",
    ),
}  # fmt: skip
"""What the owned and shared modes need, in which the cache is the daemon's memory."""
_OF_MODE: Final[Mapping[str, tuple[Parts, ...]]] = {
    "offload": (
        _COMMON,
        {
            f"{_BASE}:KVConnectorBase_V1": (
                "bind_gpu_block_pool", "get_block_ids_with_load_errors", "get_kv_connector_stats",
                "get_transfer_results",
            ),
            "vllm.v1.core.block_pool:BlockPool": ("cache_full_blocks", "evict_blocks"),
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector": (
                "connector_scheduler", "connector_worker",
            ),
            f"{_OFFLOADING}.common:OffloadingConnectorMetadata": (),
            f"{_OFFLOADING}.common:OffloadingWorkerMetadata": ("aggregate",),
            f"{_OFFLOADING}.config:build_offloading_config": (),
            f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler": (
                "_current_batch_allocated_block_ids", "_current_batch_jobs_to_flush", "_jobs", "_req_status",
                "_sliding_window_groups", "manager",
            ),
            f"{_OFFLOADING}.worker:OffloadingConnectorWorker": ("worker",),
            "vllm.v1.core.kv_cache_manager:KVCacheBlocks": (),
            "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("block_hash", "block_id", "is_null"),
            "vllm.v1.core.sched.output:SchedulerOutput": (
                "finished_req_ids", "kv_cache_block_copies", "num_scheduled_tokens", "preempted_req_ids",
                "scheduled_cached_reqs", "scheduled_new_reqs",
            ),
            "vllm.v1.kv_cache_interface:FullAttentionSpec": (),
            "vllm.v1.kv_offload.base:OffloadingManager": (
                "complete_load", "complete_store", "lookup", "prepare_load", "prepare_store",
            ),
            "vllm.v1.kv_offload.base:OffloadingSpec": (),
            "vllm.v1.request:Request": (
                "num_computed_tokens", "num_tokens", "request_id", "skip_reading_prefix_cache", "status",
            ),
            "vllm.v1.request:RequestStatus": ("FINISHED_ERROR",),
        },
    ),
    "owned": (
        _COMMON,
        _MEMORY,
        {
            f"{_BASE}:KVConnectorBase_V1": ("bind_gpu_block_pool",),
            "vllm.v1.core.block_pool:BlockPool": ("_insert_block_hash", "move_block_hashes"),
            "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": (
                "append_n", "fake_free_list_head", "fake_free_list_tail", "prepend_n", "remove",
            ),
        },
    ),
    "shared": (
        _COMMON,
        _MEMORY,
        {
            f"{_BASE}:KVConnectorBase_V1": ("on_new_request",),
            "vllm.v1.core.block_pool:BlockPool": ("cached_block_hashes_by_block", "emit_cached_block_events"),
            "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": (
                "find_longest_cache_hit", "get_num_blocks_to_allocate",
            ),
            "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": ("num_free_blocks", "popleft_n"),
            "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": (),
        },
    ),
}  # fmt: skip
MODES: Final = tuple(_OF_MODE)


def missing_hooks(mode: str) -> list[str]:
    """Return what the installed vLLM lacks for a mode; empty if it is supported."""
    return [
        lack
        for parts in _OF_MODE[mode]
        for place, names in parts.items()
        for lack in _lacks(place, names)
    ]


@cache
def require_hooks(mode: str) -> None:
    """Refuse a vLLM that a mode's connector cannot work with.

    Raises:
        ImportError: vLLM is not installed, or lacks hooks; the message names them and the releases that have them.
    """
    if find_spec("vllm") is None:
        raise ImportError(
            f"kvlease.integrations.vllm needs vLLM {SUPPORTED_VERSIONS}, which is not installed; "
            "install kvlease in the environment of vLLM"
        )
    if lacks := missing_hooks(mode):
        raise ImportError(
            f"kvlease supports vLLM {SUPPORTED_VERSIONS}; this is {_version()}, which lacks "
            f"{', '.join(dict.fromkeys(lacks))} for the mode {mode}; install a supported vLLM, or a version of "
            "kvlease that supports this one"
        )


@cache
def warn_of_another_release() -> None:
    """Log, once in a process, that the installed vLLM is not of a release that the connectors are tested with."""
    version = _version()
    if ".".join(version.split(".")[:2]) != SUPPORTED_VERSIONS:
        _logger.warning(
            "kvlease is tested with vLLM %s; this is %s, which has all that is built on, but may use it in another "
            "way: before you rely on it, compare its answers with those without kvlease.",
            SUPPORTED_VERSIONS,
            version,
            extra={"action": "vllm_untested"},
        )


def _lacks(place: str, names: tuple[str, ...]) -> Iterator[str]:
    module_name, _, class_name = place.partition(":")
    try:
        found = getattr(import_module(module_name), class_name, None)
    except ImportError:
        found = None
    if found is None:
        yield f"{module_name}.{class_name}"
    else:
        yield from (f"{class_name}.{name}" for name in names if not _has(found, name))


def _has(found: Any, name: str) -> bool:
    """Tell whether a class has an attribute, or its constructor gives it to objects."""
    code = getattr(found.__init__, "__code__", None)
    return hasattr(found, name) or (code is not None and name in code.co_names)


def _version() -> str:
    return str(getattr(import_module("vllm"), "__version__", "unknown"))
