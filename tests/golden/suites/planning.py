"""Answer the vectors of planning with the planner."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvlease.errors import KVLeaseError
from kvlease.plan import CachePlan, GroupPlan, LayerPlacement, PlanInputs, RankPlan
from kvlease.spec import HiddenState, LayerSpec
from kvleased.planning import plan as plan_of
from tests.golden.invariants import checked
from tests.golden.words import TYPE_OF_KIND, error_words, kind_word, plan_inputs_of, spec_words

_MATCH_RULES = (
    "INVALID_PREFIX_MATCH_UNIT",
    "HASH_BLOCK_NOT_ALIGNED",
    "TOKENS_PER_STATE_NOT_ALIGNED",
)
"""Refusals about how prefixes are matched: the reference makes them after the plan, and we before."""

_MEMORY_RULES = ("NOT_ENOUGH_MEMORY", "NO_AVAILABLE_MEMORY")
"""Refusals that we make for the rank that decides, and the reference for the first rank that it checks."""
_PLENTY_BYTES = 2**50


def plan(given: dict[str, Any]) -> dict[str, Any]:
    """Return the plan in the reference's words."""
    inputs = plan_inputs_of(given)
    try:
        made = _planned(inputs)
    except KVLeaseError as refusal:
        words = error_words(refusal)
        if words["class"] not in _MATCH_RULES:
            raise
        # For the numbers that do not depend on matching, plan again without matching.
        engine = replace(
            inputs.engine, match_tokens=None, prefix_caching=False, has_connector=False
        )
        return {
            **_numbers(_planned(replace(inputs, engine=engine)), given),
            "block_size_error": words,
        }
    return {**_numbers(made, given), **_matching(made)}


def _planned(inputs: PlanInputs) -> CachePlan:
    """Return the plan, or raise the refusal of the first rank with too little memory, as the reference does."""
    try:
        return plan_of(inputs)
    except KVLeaseError as refusal:
        if error_words(refusal)["class"] in _MEMORY_RULES and not inputs.device_blocks:
            _refuse_first_rank(inputs)
        raise


def _refuse_first_rank(inputs: PlanInputs) -> None:
    """Plan once for each rank with only its memory scarce, and raise the first refusal."""
    for index in range(len(inputs.ranks)):
        ranks = tuple(
            rank if other == index else replace(rank, device_bytes=_PLENTY_BYTES)
            for other, rank in enumerate(inputs.ranks)
        )
        try:
            plan_of(replace(inputs, ranks=ranks))
        except KVLeaseError as refusal:
            # Refusals that are not about memory come later.
            if error_words(refusal)["class"] in _MEMORY_RULES:
                raise


def _numbers(made: CachePlan, given: Mapping[str, Any]) -> dict[str, Any]:
    checked(made)
    words: dict[str, Any] = {
        "num_blocks": made.num_blocks,
        "usable_blocks": made.usable_blocks,
        "max_model_len": made.longest_request_tokens,
        "groups": [_group_words(group, made, given["specs"]) for group in made.groups],
        "workers": [_rank_words(rank, made) for rank in made.ranks],
        "kv_tp_replicas": made.tensor_replicas,
    }
    if not made.groups:
        return words
    # The reference counts the null block in both figures; our plan leaves it out.
    concurrency = made.num_blocks / made.blocks_per_longest_request
    return {
        **words,
        "blocks_per_request_by_group": [group.blocks_per_longest_request for group in made.groups],
        "blocks_per_request": made.blocks_per_longest_request,
        "max_concurrency": concurrency,
        "kv_cache_size_tokens": int(concurrency * made.longest_request_tokens),
        "resolved_block_size": made.tokens_per_block,
    }


def _matching(made: CachePlan) -> dict[str, Any]:
    if not made.groups:
        return {}
    return {
        "scheduler_block_size": made.scheduler_block_tokens,
        "hash_block_size": made.hash_block_tokens,
        "cache_hit_alignment_tokens": made.hit_alignment_tokens,
    }


def _group_words(
    group: GroupPlan, made: CachePlan, specs: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    placements = {layer.name: layer for rank in made.ranks for layer in rank.layers}
    pages = [placements[name].bytes_per_page for name in group.layer_names]
    is_uniform_type = not group.has_equal_layers or _is_packed(group, made)
    words = {
        "type": "uniform_type" if is_uniform_type else TYPE_OF_KIND[group.spec.kind],
        "kind": _kind_word([placements[name].spec for name in group.layer_names]),
        "block_size": group.tokens_per_block,
        "page_size_bytes": sum(pages) if is_uniform_type else group.bytes_per_page,
        "dcp_sharded": group.is_context_sharded,
        "prefix_cacheable": group.is_prefix_cacheable,
        "is_eagle_group": group.is_drafted,
        "layer_names": list(group.layer_names),
    }
    if is_uniform_type:
        block_size = group.spec.tokens_per_block
        return {**words, "layer_page_size_bytes": pages, "layer_block_size": block_size}
    return {**words, "spec": spec_words(group.spec, _words_of_kind(group.spec.kind, specs))}


def _is_packed(group: GroupPlan, made: CachePlan) -> bool:
    """Tell whether blocks hold pages of several sizes: then the reference names groups by layer, even equal ones."""
    pages = {
        layer.bytes_per_page
        for rank in made.ranks
        for layer in rank.layers
        if not isinstance(layer.spec, HiddenState)
    }
    is_hidden = isinstance(group.spec, HiddenState)
    return made.layout.is_block_outermost and len(pages) > 1 and not is_hidden


def _kind_word(specs: Sequence[LayerSpec]) -> str:
    """Return the reference's word for a group's kind: that of its layers, or what their kinds have in common."""
    kinds = {kind_word(spec) for spec in specs}
    if len(kinds) == 1:
        return kinds.pop()
    return "full_attention" if all(spec.keeps_all for spec in specs) else "unknown"


def _words_of_kind(kind: str, specs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the words of a kind's specs, taken from a spec of that kind in the vector."""
    wanted = TYPE_OF_KIND[kind]
    return next((words for words in specs.values() if words["type"] == wanted), {})


def _rank_words(rank: RankPlan, made: CachePlan) -> dict[str, Any]:
    on_rank = {layer.name for layer in rank.layers}
    words: dict[str, Any] = {
        "kv_cache_bytes": rank.device_bytes,
        "group_layers": [
            [name for name in group.layer_names if name in on_rank] for group in made.groups
        ],
        "tensors": [
            {
                "size": rank.device_bytes,
                "offset": tensor.offset_bytes,
                "layer_stride": tensor.layer_stride_bytes,
                "block_stride": tensor.block_stride_bytes,
                "layers": list(tensor.layer_names),
            }
            for tensor in rank.tensors
        ],
        "regions": _regions(rank),
        "needs_zeroing": rank.needs_scrub,
    }
    if made.groups:
        words["bytes_per_block"] = rank.bytes_per_block
        words["bytes_needed_for_one_request"] = rank.bytes_per_longest_request
    return words


def _regions(rank: RankPlan) -> list[dict[str, Any]]:
    """Return the layers by the place of their pages; layers of different groups may share a place."""
    sharers: dict[tuple[int, int], list[LayerPlacement]] = {}
    for layer in rank.layers:
        sharers.setdefault((layer.offset_bytes, layer.block_stride_bytes), []).append(layer)
    return [
        {
            "offset": offset,
            "block_stride": stride,
            "page_size_bytes": max(layer.bytes_per_page for layer in layers),
            "shared_by": sorted(layer.name for layer in layers),
        }
        for (offset, stride), layers in sorted(sharers.items())
    ]
