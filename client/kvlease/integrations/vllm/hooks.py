"""Own which parts of vLLM the connectors build on, and the refusal of one that lacks any; nothing of it is changed."""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Final

SUPPORTED_VERSIONS: Final = "0.32"
"""The releases that the connectors are tested with."""

_CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
_HOOKS: Final = {
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": ("register_connector",),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": (
        "request_finished_all_groups",
    ),
    _CONNECTOR: (
        "bind_kv_cache_manager", "build_connector_meta", "build_connector_worker_meta", "get_mem_pool_context",
        "get_num_new_matched_tokens", "get_required_kvcache_layout", "get_transfer_results", "handle_preemptions",
        "has_pending_block_frees", "register_kv_caches", "requires_kv_delivery", "reset_cache",
        "update_connector_output", "update_state_after_alloc",
    ),
    "vllm.v1.core.block_pool:BlockPool": (
        "cache_full_blocks", "evict_blocks", "free_blocks", "get_cached_block", "get_new_blocks",
        "get_num_free_blocks", "reset_prefix_cache", "touch",
    ),
    "vllm.v1.kv_cache_interface:KVCacheConfig": (),
    "vllm.v1.kv_cache_interface:KVCacheTensor": (),
    "vllm.v1.kv_offload.base:OffloadingManager": (
        "complete_load", "complete_store", "lookup", "prepare_load", "prepare_store",
    ),
    "vllm.v1.kv_offload.base:OffloadingSpec": (),
}  # fmt: skip
"""Classes by module, and the methods of them that are called or overridden."""


def missing_hooks() -> list[str]:
    """Return what the vLLM that is installed lacks; nothing where it is a supported one."""
    return [lack for place, names in _HOOKS.items() for lack in _lacks(place, names)]


@cache
def require_hooks() -> None:
    """Refuse a vLLM that the connectors cannot work with.

    Raises:
        ImportError: it is not installed, or lacks hooks; the message names them and the releases that have them.
    """
    if find_spec("vllm") is None:
        raise ImportError(
            f"kvlease.integrations.vllm needs vLLM {SUPPORTED_VERSIONS}, which is not installed; "
            "install kvlease where vLLM is"
        )
    if lacks := missing_hooks():
        raise ImportError(
            f"kvlease supports vLLM {SUPPORTED_VERSIONS}; this is {_version()}, which lacks "
            f"{', '.join(lacks)}; install a supported vLLM, or a kvlease that supports this one"
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
        yield from (f"{class_name}.{name}" for name in names if not hasattr(found, name))


def _version() -> str:
    return str(getattr(import_module("vllm"), "__version__", "unknown"))
