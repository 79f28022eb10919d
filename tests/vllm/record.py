"""Record the plans of the installed reference engine, in the golden vectors' format.

Runs with .venv-vllm's interpreter: reads vectors without answers from standard input and writes them with answers.
"""

import copy
import json
import logging
import math
import os
import sys
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from reference_words import TYPE_OF_CLASS, error_words, plain, spec_of, spec_words

from vllm.v1 import kv_cache_interface as specs_of
from vllm.v1.core import kv_cache_utils as planner


def plan(given: dict[str, Any]) -> dict[str, Any]:
    """Return the reference's plan."""
    config = config_of(given["config"])
    workers = given["workers"]
    maps = [
        {
            name: spec_of(given["specs"][spec])
            for name, spec in workers[worker.get("layers_same_as", index)]["layers"]
        }
        for index, worker in enumerate(workers)
    ]
    configs = planner.get_kv_cache_configs(
        config, copy.deepcopy(maps), [worker["available_memory_bytes"] for worker in workers]
    )
    answer: dict[str, Any] = {
        "num_blocks": configs[0].num_blocks,
        "usable_blocks": configs[0].num_blocks - 1,
        "max_model_len": config.model_config.max_model_len,
        "groups": groups_words(config, maps),
        "workers": [worker_words(config, found) for found in configs],
        "kv_tp_replicas": configs[0].kv_tp_replicas,
    }
    if not answer["groups"]:
        return answer
    return {**answer, **scheduler_words(config, configs)}


def spec_metrics(given: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of one layer."""
    config, spec = config_of(given["config"]), spec_of(given["spec"])
    bytes_of_request = spec.max_memory_usage_bytes(config)
    return {
        "page_size_bytes": spec.page_size_bytes,
        "storage_block_size": spec.num_states,
        "head_slots": spec.num_heads,
        "state_bytes": spec.state_content_size_bytes,
        "block_stride_alignment_bytes": spec.get_block_stride_alignment(),
        "layer_outer_block_stride": planner._get_layer_block_stride(spec),
        "prefix_cacheable": spec.prefix_cacheable,
        "uses_slot_mapping": spec.uses_slot_mapping,
        "max_memory_usage_bytes": bytes_of_request,
        "blocks_per_request": math.ceil(Fraction(bytes_of_request, spec.page_size_bytes)),
        "block_table_entries": spec.max_num_blocks_per_req(
            config, config.model_config.max_model_len
        ),
    }


def merge_specs(given: dict[str, Any]) -> dict[str, Any]:
    """Return the reference's result of merging specs."""
    found = [spec_of(words) for words in given["specs"]]
    named = {str(index): spec for index, spec in enumerate(found)}
    answer: dict[str, Any] = {}
    try:
        answer["merged"] = spec_words(found[0].merge(found))
    except Exception as error:  # noqa: BLE001  # whatever the reference raises is its answer
        answer["error"] = error_words(error)
    answer["is_uniform_type"] = specs_of.UniformTypeKVCacheSpecs.is_uniform_type(named)
    return answer


def layout_strides(given: dict[str, Any]) -> dict[str, Any]:
    """Return the strides of a run of equal layers."""
    spec, layout = spec_of(given["spec"]), specs_of.KVCacheLayout[given["kv_cache_layout"]]
    shape = specs_of.compute_layer_kv_cache_shape_bytes(
        spec, given["num_blocks"], given["kernel_block_size"]
    )
    strides = specs_of.compute_layout_strides(
        spec,
        given["num_blocks"],
        given["num_layers"],
        layout,
        given["kernel_block_size"],
        tuple(given["fixed_strides"]),
    )
    return {
        "shape_bytes_LBHNC": [given["num_layers"], *shape],
        "strides_bytes_LBHNC": list(strides),
    }


def allocate_views(given: dict[str, Any]) -> dict[str, Any]:
    """Return the placement of the layers of given groups, and their views."""
    layout = specs_of.KVCacheLayout[given["kv_cache_layout"]]
    groups = [_group(pairs, given["specs"]) for pairs in given["groups"]]
    planner.validate_kv_cache_layout(layout, groups)
    block = planner._get_kv_cache_bytes_per_block(groups, layout)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
    )
    num_blocks = given["num_blocks"]
    found = planner.get_kv_cache_config_from_groups(config, groups, num_blocks * block)
    raw = torch.zeros(num_blocks * block, dtype=torch.int8)
    of_layer = {
        name: spec_of(given["specs"][spec]) for group in given["groups"] for name, spec in group
    }
    kernel = {
        name: tokens
        for group, tokens in zip(given["groups"], given["kernel_block_sizes"], strict=True)
        for name, _ in group
    }
    views = {}
    for tensor in found.kv_cache_tensors:
        spec = of_layer[tensor.layers[0]]
        tokens = kernel[tensor.layers[0]]
        made = specs_of.create_kv_cache_views(raw, spec, num_blocks, layout, tensor, tokens)
        views |= dict(zip(tensor.layers, map(view_words, made), strict=True))
    return {
        "bytes_per_block": block,
        "allocation_bytes": raw.numel(),
        "tensors": worker_tensors(found),
        "views": views,
    }


def _group(pairs: list[list[str]], words: dict[str, Any]) -> Any:
    layers = {name: spec_of(words[spec]) for name, spec in pairs}
    first = next(iter(layers.values()))
    if any(spec != first for spec in layers.values()):
        spec = specs_of.UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=layers)
        return specs_of.KVCacheGroupSpec(list(layers), spec)
    return specs_of.KVCacheGroupSpec(list(layers), first)


def view_words(view: torch.Tensor) -> dict[str, Any]:
    """Return one layer's view."""
    size = view.element_size()
    last = sum(
        (extent - 1) * stride for extent, stride in zip(view.shape, view.stride(), strict=True)
    )
    return {
        "dtype": plain(view.dtype),
        "shape": list(view.shape),
        "stride": list(view.stride()),
        "storage_offset": view.storage_offset(),
        "element_size": size,
        "end_byte": (view.storage_offset() + last + 1) * size if view.numel() else 0,
        "storage_bytes": view.untyped_storage().nbytes(),
    }


def groups_words(config: SimpleNamespace, maps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of the whole model, before they are projected to workers."""
    union: dict[str, Any] = {}
    for worker in copy.deepcopy(maps):
        for name, spec in worker.items():
            union.setdefault(name, spec)
    extra = max(0, config.num_prefill_lookahead_tokens - 1)
    for name, spec in union.items():
        if isinstance(spec, specs_of.SlidingWindowSpec):
            union[name] = planner.replace(spec, extra_retained_tokens=extra)
    return [group_words(group) for group in planner.get_kv_cache_groups(config, union)]


def group_words(group: Any) -> dict[str, Any]:
    """Return one group."""
    spec = group.kv_cache_spec
    words = {
        "block_size": spec.block_size,
        "page_size_bytes": spec.page_size_bytes,
        "dcp_sharded": spec.dcp_sharded,
        "prefix_cacheable": spec.prefix_cacheable,
        "is_eagle_group": group.is_eagle_group,
        "layer_names": list(group.layer_names),
    }
    if isinstance(spec, specs_of.UniformTypeKVCacheSpecs):
        pages = [layer.page_size_bytes for layer in spec.kv_cache_specs.values()]
        return {**words, "type": "uniform_type", "layer_page_size_bytes": pages}
    return {**words, "type": TYPE_OF_CLASS[type(spec).__name__], "spec": spec_words(spec)}


def worker_words(config: SimpleNamespace, found: Any) -> dict[str, Any]:
    """Return one worker's part of the plan."""
    tensors = worker_tensors(found)
    words: dict[str, Any] = {
        "kv_cache_bytes": tensors[0]["size"] if tensors else 0,
        "group_layers": [list(group.layer_names) for group in found.kv_cache_groups],
        "tensors": tensors,
        "needs_zeroing": found.needs_kv_cache_zeroing,
    }
    if found.kv_cache_groups:
        words["bytes_per_block"] = planner._pool_bytes_per_block(config, found.kv_cache_groups)
        words["bytes_needed_for_one_request"] = planner._max_memory_usage_bytes_from_groups(
            config, found.kv_cache_groups
        )
    return words


def worker_tensors(found: Any) -> list[dict[str, Any]]:
    """Return the runs of layers that one worker places."""
    return [
        {
            "size": tensor.size,
            "offset": tensor.offset,
            "layer_stride": tensor.layer_stride,
            "block_stride": tensor.block_stride,
            "layers": list(tensor.layers),
        }
        for tensor in found.kv_cache_tensors
    ]


def scheduler_words(config: SimpleNamespace, configs: list[Any]) -> dict[str, Any]:
    """Return the scheduler's part of the plan."""
    found = planner.generate_scheduler_kv_cache_config(configs)
    groups = found.kv_cache_groups
    tokens, concurrency = planner.get_kv_cache_capacity(config, found)
    by_group = [
        math.ceil(Fraction(spec.max_memory_usage_bytes(config), spec.page_size_bytes))
        for spec in (group.kv_cache_spec for group in groups)
    ]
    cacheable = [group for group in groups if group.kv_cache_spec.prefix_cacheable] or groups
    config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in cacheable)
    words: dict[str, Any] = {
        "blocks_per_request_by_group": by_group,
        "blocks_per_request": sum(by_group),
        "max_concurrency": float(concurrency),
        "kv_cache_size_tokens": tokens,
        "resolved_block_size": config.cache_config.block_size,
    }
    try:
        scheduler, hashed = planner.resolve_kv_cache_block_sizes(found, config)
    except ValueError as error:
        return {**words, "block_size_error": error_words(error)}
    hit = planner.resolve_cache_hit_alignment_tokens(found, config, scheduler, hashed)
    return {
        **words,
        "scheduler_block_size": scheduler,
        "hash_block_size": hashed,
        "cache_hit_alignment_tokens": hit,
    }


def config_of(words: dict[str, Any]) -> SimpleNamespace:
    """Return the part of an engine's configuration that planning reads."""
    layout = specs_of.KVCacheLayout[words["kv_cache_layout"]]
    speculative = None
    if words["mtp_speculative"]:
        speculative = SimpleNamespace(
            method="mtp", use_eagle=lambda: True, use_eagle_block_drop=lambda: True
        )
    return SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            block_size=words["block_size"],
            enable_prefix_caching=words["enable_prefix_caching"],
            get_resolved_kv_cache_layout=lambda: layout,
            mamba_cache_mode=words["mamba_cache_mode"],
            num_gpu_blocks_override=words["num_gpu_blocks_override"],
            prefix_cache_retention_interval=None,
            prefix_match_unit=words["prefix_match_unit"],
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=SimpleNamespace() if words["kv_connector"] else None,
        max_in_flight_tokens=words["max_concurrent_batches"] * words["max_num_batched_tokens"],
        model_config=SimpleNamespace(
            max_model_len=words["max_model_len"],
            original_max_model_len=-1 if words["auto_fit_max_model_len"] else None,
            hf_config=SimpleNamespace(model_type="none"),
        ),
        num_prefill_lookahead_tokens=words["num_prefill_lookahead_tokens"],
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=words["decode_context_parallel_size"],
            pipeline_parallel_size=words["pipeline_parallel_size"],
            tensor_parallel_size=words["tensor_parallel_size"],
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=words["disable_hybrid_kv_cache_manager"],
            max_num_encoder_input_tokens=words["max_num_encoder_input_tokens"],
            max_num_batched_tokens=words["max_num_batched_tokens"],
        ),
        speculative_config=speculative,
    )


OPERATIONS = {
    "plan": plan,
    "spec_metrics": spec_metrics,
    "merge_specs": merge_specs,
    "layout_strides": layout_strides,
    "allocate_views": allocate_views,
}


def main() -> None:
    """Answer all vectors of standard input."""
    logging.disable(logging.CRITICAL)
    content = json.load(sys.stdin)
    for vector in content["vectors"]:
        try:
            vector["expected"] = OPERATIONS[vector["op"]](vector["input"])
        except Exception as error:  # noqa: BLE001  # whatever the reference raises is its answer
            vector["expected"] = {"error": error_words(error)}
    json.dump(content, sys.stdout)


if __name__ == "__main__":
    main()
