"""Own the way from an engine's configuration to a plan's inputs, and the check that both sides place every byte alike.

It reads vLLM's objects by their fields and imports nothing of vLLM. The daemon's planner does the arithmetic.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Final

from kvlease.errors import InvalidError
from kvlease.geometry import exact_div
from kvlease.plan import CachePlan, EngineInputs, ParallelInputs, PlanInputs, RankPlan, TensorPlan
from kvlease.spec import AttentionSpec, LayerSpec, spec_from_fields

NULL_BLOCKS: Final = 1
"""vLLM pads its tables with block 0, which it never grants."""

_KINDS: Final[Mapping[str, str]] = {
    "FullAttentionSpec": "full_attention",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MLAAttentionSpec": "mla",
    "SlidingWindowMLASpec": "sliding_window_mla",
    "MambaSpec": "state_space",
    "CrossAttentionSpec": "cross_attention",
    "SinkFullAttentionSpec": "sink_attention",
    "RSWASpec": "retained_window",
    "CircularBufferSpec": "ring_state",
    "HiddenStateCacheSpec": "hidden_state",
}
"""Our kinds of layer, by the name of vLLM's class."""

_FIELDS: Final[Mapping[str, str]] = {
    "block_size": "tokens_per_block",
    "page_size_padded": "bytes_per_page_padded",
    "state_content_bytes": "bytes_per_state_packed",
    "max_tp_shards": "tensor_shards_max",
    "dcp_sharded": "is_context_sharded",
    "sliding_window": "window_tokens",
    "attention_chunk_size": "chunk_tokens",
    "extra_retained_tokens": "retained_tokens",
    "alignment": "page_multiple_bytes",
    "is_index_group_leader": "leads_index_group",
    "non_causal_multi_token_decode": "decodes_several_tokens",
    "bounded_replay": "is_replayed",
    "sink_len": "sink_tokens",
    "rswa_window": "retained_window_tokens",
    "num_prefill_checkpoint_blocks": "num_checkpoint_blocks",
    "prefill_checkpoint_alignment": "checkpoint_multiple_tokens",
    "tp_replicated": "is_replicated",
}
"""Our fields by vLLM's, if only the name differs; a field that is neither here nor below has the same name."""

_FIELDS_WITHOUT_BYTES: Final[Mapping[str, tuple[str, ...]]] = {
    "state_space": (
        "dcp_sharded",
        "mamba_cache_mode",
        "mamba_type",
        "num_heads",
        "tokens_per_state",
    ),
}
"""Fields of a kind that say nothing about bytes, such as how many heads a state has or which states are kept."""

_LAYER_INDEX: Final = re.compile(r"\.(\d+)(?:\.|$)")
_OF_A_DRAFT: Final = "draft_model."
"""How the names of a draft model's layers begin, if it is a model of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number on which the daemon's plan and the engine do not agree."""

    what: str
    """The number, such as "num_blocks" or "offset of model.layers.0.self_attn.attn"."""
    planned: object
    """What the daemon's plan says."""
    found: object
    """What the engine has."""

    def __str__(self) -> str:
        """Return the difference as part of a sentence."""
        return f"{self.what}: {self.planned} in kvlease's plan, {self.found} in vLLM"


# From vLLM's terms to ours.


def plan_inputs(vllm_config: Any, kv_cache_config: Any, *, model_digest: str = "") -> PlanInputs:
    """Return the inputs whose plan is vLLM's own placement: the same blocks, groups, offsets and strides.

    `kv_cache_config` is a worker's or the scheduler's; both give the same inputs. The caller adds lower tiers by
    `dataclasses.replace`.

    Raises:
        InvalidError: the configuration has something that no plan can express; the message names it.
    """
    _refuse_what_has_no_plan(vllm_config, kv_cache_config)
    return PlanInputs(
        layers=_layers(kv_cache_config),
        tokens_per_block=vllm_config.cache_config.block_size,
        layout=kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout,
        device_blocks=kv_cache_config.num_blocks,
        null_blocks=NULL_BLOCKS,
        block_multiple_bytes=1,
        longest_request_tokens=vllm_config.model_config.max_model_len,
        engine=_engine(vllm_config, kv_cache_config),
        parallel=ParallelInputs(
            tensor_ranks=vllm_config.parallel_config.tensor_parallel_size,
            context_ranks=vllm_config.parallel_config.decode_context_parallel_size,
        ),
        model_digest=model_digest,
    )


def layer_of(name: str, spec: Any) -> LayerSpec:
    """Return our spec for vLLM's spec of a layer.

    Raises:
        InvalidError: vLLM has a kind of layer, or a field of one, that kvlease does not know.
    """
    class_name = type(spec).__name__
    if class_name not in _KINDS:
        message = f"layer {name!r} is a {class_name} of vLLM, which kvlease cannot place; it knows {', '.join(_KINDS)}"
        raise InvalidError(message, resource="layers", rule="unknown_kind")
    kind = _KINDS[class_name]
    words: dict[str, Any] = {"kind": kind, "name": name}
    for field in fields(spec):
        if field.name not in _FIELDS_WITHOUT_BYTES.get(kind, ()):
            words.update(_words(field.name, getattr(spec, field.name)))
    return _as_packed(spec_from_fields(words), spec)


def _words(name: str, value: Any) -> dict[str, Any]:
    """Return our field or fields for one of vLLM's, with the value."""
    if name == "tokens_per_state" and isinstance(value, Fraction):
        return {"tokens_per_state": value.numerator, "states_per_token": value.denominator}
    if name == "block_stride_alignment":
        unit = "tokens" if hasattr(value, "base") else "bytes"
        return {f"block_stride_multiple_{unit}": getattr(value, "base", value)}
    if name in _SAYINGS:
        field, say = _SAYINGS[name]
        return {field: say(value)}
    return {_FIELDS.get(name, name): value}


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


_SAYINGS: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "dtype": ("dtype", _dtype),
    "dtypes": ("dtypes", lambda dtypes: tuple(map(_dtype, dtypes))),
    "kv_quant_mode": ("quantisation", lambda mode: mode.name.lower()),
    "non_causal": ("is_causal", lambda is_not: not is_not),
    "cache_role": ("role", lambda role: role.value),
    "cache_dtype_str": ("packed_format", lambda name: name or ""),
    "model_version": ("model_version", lambda name: name or ""),
}
"""Our field, and how to turn vLLM's value into ours, if the value has another form."""


def _as_packed(layer: LayerSpec, spec: Any) -> LayerSpec:
    """Return a quantised layer with vLLM's own bytes and head slots, whatever rule gave them."""
    if not isinstance(layer, AttentionSpec) or layer.quantisation == "none":
        return layer
    return replace(
        layer,
        num_head_slots=spec.num_heads,
        bytes_per_state_packed=spec.state_content_size_bytes,
    )


def _layers(kv_cache_config: Any) -> tuple[LayerSpec, ...]:
    """Return all layers in the order of the numbers in their names; those of a draft come after the model's."""
    found = [
        layer_of(name, spec)
        for group in kv_cache_config.kv_cache_groups
        for name, spec in _specs_of(group, kv_cache_config).items()
    ]
    return tuple(sorted(found, key=lambda layer: _order_of(layer.name)))


def _order_of(name: str) -> tuple[bool, int]:
    """Return what orders layers: whether a draft model numbers them anew, and the first number between dots, or 0."""
    found = _LAYER_INDEX.search(f".{name}")
    return name.startswith(_OF_A_DRAFT), int(found[1]) if found else 0


def _specs_of(group: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Return the spec of every layer of a group.

    Raises:
        InvalidError: layers of the group differ, and the configuration, being the scheduler's, does not say how.
    """
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if by_layer is not None:
        return {name: by_layer[name] for name in group.layer_names}
    names = set(group.layer_names)
    runs = [run for run in kv_cache_config.kv_cache_tensors if names.intersection(run.layers)]
    if len(runs) > 1:
        message = (
            f"layers of the group of {group.layer_names[0]!r} differ in their pages, and the scheduler's part of the "
            "engine is not told how; register the cache from a worker's part"
        )
        raise InvalidError(message, resource="layers", rule="layers_collapsed")
    return dict.fromkeys(group.layer_names, group.kv_cache_spec)


def _engine(vllm_config: Any, kv_cache_config: Any) -> EngineInputs:
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    kinds = {_kind_of(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups}
    return EngineInputs(
        tokens_per_step=scheduler.max_num_batched_tokens,
        steps_in_flight=exact_div(
            vllm_config.max_in_flight_tokens, scheduler.max_num_batched_tokens
        ),
        lookahead_tokens=vllm_config.num_prefill_lookahead_tokens,
        encoder_tokens_max=(
            scheduler.max_num_encoder_input_tokens if "CrossAttentionSpec" in kinds else 0
        ),
        state_mode=cache.mamba_cache_mode,
        prefix_caching=bool(cache.enable_prefix_caching),
        has_connector=vllm_config.kv_transfer_config is not None,
        match_tokens=cache.prefix_match_unit,
        one_group=bool(scheduler.disable_hybrid_kv_cache_manager),
        drafts_with_last_layer=any(
            group.is_eagle_group for group in kv_cache_config.kv_cache_groups
        ),
    )


def _kind_of(spec: Any) -> str:
    return type(getattr(spec, "first_spec", spec)).__name__


def _refuse_what_has_no_plan(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size"):
        ranks = getattr(parallel, name, 1)
        if ranks > 1:
            message = f"{name} is {ranks}; kvlease knows only the layers of one rank: set it to 1"
            raise InvalidError(message, resource=name, rule="ranks_unknown", need=ranks, limit=1)
    if any(group.host_resident for group in kv_cache_config.kv_cache_groups):
        message = (
            "a group of layers is kept in host memory by the engine itself; switch HiSparse off"
        )
        raise InvalidError(message, resource="hisparse_config", rule="host_resident_group")


# The comparison, number by number.


def agreement(
    plan: CachePlan,
    kv_cache_config: Any,
    tensors: Mapping[str, Any] | None = None,
    *,
    rank: int = 0,
) -> tuple[Difference, ...]:
    """Return every number in which a plan and the engine's configuration differ; empty if all bytes lie alike.

    `tensors` are those of `register_kv_caches`, if they exist yet: their addresses and strides are compared, too.
    """
    ours = plan.ranks[min(rank, len(plan.ranks) - 1)]
    found = [*_of_whole(plan, kv_cache_config), *_of_groups(plan, kv_cache_config)]
    found += _of_runs(ours, kv_cache_config)
    if tensors is not None:
        found += _of_tensors(plan, ours, tensors)
    return tuple(found)


def _compared(what: str, planned: object, found: object) -> Iterator[Difference]:
    if planned != found:
        yield Difference(what=what, planned=planned, found=found)


def _of_whole(plan: CachePlan, config: Any) -> Iterator[Difference]:
    yield from _compared("num_blocks", plan.num_blocks, config.num_blocks)
    yield from _compared("null blocks", plan.null_blocks, NULL_BLOCKS)
    yield from _compared("copies of each rank's bytes", plan.tensor_replicas, config.kv_tp_replicas)
    if config.kv_cache_layout is not None:
        yield from _compared("layout", str(plan.layout), config.kv_cache_layout)
    if config.hash_block_size is not None:
        tokens = plan.hash_block_tokens
        yield from _compared("tokens of a block hash", tokens, config.hash_block_size)
    if config.cache_hit_alignment_tokens is not None:
        aligned = plan.hit_alignment_tokens
        found = config.cache_hit_alignment_tokens
        yield from _compared("tokens at whose multiples a hit ends", aligned, found)


def _of_groups(plan: CachePlan, config: Any) -> Iterator[Difference]:
    theirs = config.kv_cache_groups
    yield from _compared("number of groups", len(plan.groups), len(theirs))
    for index, (ours, group) in enumerate(zip(plan.groups, theirs, strict=False)):
        spec = group.kv_cache_spec
        names = tuple(group.layer_names)
        yield from _compared(f"layers of group {index}", ours.layer_names, names)
        yield from _compared(
            f"tokens per block of group {index}", ours.tokens_per_block, spec.block_size
        )
        # If layers differ, the scheduler's configuration has only one of them.
        if hasattr(spec, "kv_cache_specs") or ours.has_equal_layers:
            pages = ours.bytes_per_page
            if hasattr(spec, "kv_cache_specs") and ours.has_equal_layers:
                pages *= len(names)
            yield from _compared(f"bytes per page of group {index}", pages, spec.page_size_bytes)
        yield from _compared(
            f"prefix caching of group {index}", ours.is_prefix_cacheable, spec.prefix_cacheable
        )


def _of_runs(ours: RankPlan, config: Any) -> Iterator[Difference]:
    """Compare the size of the one buffer, and where each layer's pages lie in it."""
    sizes = {run.size for run in config.kv_cache_tensors}
    yield from _compared("bytes of the pool", {ours.device_bytes}, sizes)
    planned = dict(_places(ours.tensors))
    found = {
        name: (run.offset + index * run.layer_stride, run.block_stride)
        for run in config.kv_cache_tensors
        for index, name in enumerate(run.layers)
    }
    yield from _compared("layers with a place", sorted(planned), sorted(found))
    for name in sorted(planned.keys() & found.keys()):
        for index, what in enumerate(("offset", "bytes from block to block")):
            yield from _compared(f"{what} of {name}", planned[name][index], found[name][index])


def _places(runs: Sequence[TensorPlan]) -> Iterator[tuple[str, tuple[int, int]]]:
    for run in runs:
        for index, name in enumerate(run.layer_names):
            yield (
                name,
                (run.offset_bytes + index * run.layer_stride_bytes, run.block_stride_bytes),
            )


def _of_tensors(
    plan: CachePlan, ours: RankPlan, tensors: Mapping[str, Any]
) -> Iterator[Difference]:
    """Compare the engine's tensors, which may count kernel blocks, several to a block."""
    for layer in ours.layers:
        name = layer.name
        if name not in tensors:
            yield Difference(what=f"tensor of {name}", planned="registered", found="missing")
            continue
        tensor = tensors[name]
        unit = tensor.element_size()
        storage = tensor.untyped_storage()
        # Some platforms pad the end of the buffer, where no block lies.
        short = storage.nbytes() < ours.device_bytes
        yield from _compared(
            f"bytes of the buffer of {name}",
            ours.device_bytes,
            storage.nbytes() if short else ours.device_bytes,
        )
        yield from _compared(
            f"offset of {name}'s tensor", layer.offset_bytes, tensor.storage_offset() * unit
        )
        kernel_blocks = _whole_times(tensor.shape[0], plan.num_blocks)
        strides = [stride * unit for stride in tensor.stride()]
        yield from _compared(
            f"bytes from block to block of {name}'s tensor",
            layer.block_stride_bytes,
            strides[0] * kernel_blocks,
        )
        if kernel_blocks == 1 and tensor.dim() == len(_PAGE_AXES) + 1:
            yield from _of_page(layer, tensor, strides)


_PAGE_AXES: Final = ("heads", "states", "bytes of a state")


def _of_page(layer: Any, tensor: Any, strides: Sequence[int]) -> Iterator[Difference]:
    """Compare the inside of a page: the extents, and the strides of axes with more than one entry."""
    spec, unit = layer.spec, tensor.element_size()
    if not isinstance(spec, AttentionSpec):
        return
    planned = (spec.head_slots, spec.states_per_block, spec.bytes_per_state)
    found = (tensor.shape[1], tensor.shape[2], tensor.shape[3] * unit)
    for axis, ours, theirs in zip(_PAGE_AXES, planned, found, strict=True):
        yield from _compared(f"{axis} of {layer.name}'s tensor", ours, theirs)
    wanted = (layer.head_stride_bytes, layer.state_stride_bytes)
    for axis, extent, ours, theirs in zip(_PAGE_AXES, planned, wanted, strides[1:], strict=False):
        if extent > 1:
            what = f"bytes from one to the next of the {axis} of {layer.name}'s tensor"
            yield from _compared(what, ours, theirs)


def _whole_times(value: int, by: int) -> int:
    """Return value / by where that is whole, else 0."""
    return exact_div(value, by) if by and value % by == 0 else 0
