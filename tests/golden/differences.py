"""Own where we differ on purpose from the reference, and our promise there; docs/differences.md explains it.

Each row recognises vectors by their input, so that it holds for vectors nobody has seen yet, and checks our promise.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Vector = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One way in which we differ from the reference."""

    name: str
    """The row's name in docs/differences.md."""
    concerns: Callable[[Vector], bool]
    """Tell by a vector's input whether the row concerns it."""
    broken_promises: Callable[[Vector, Mapping[str, Any]], Iterator[str]]
    """Yield what the answer does not keep of our promise."""
    only: str = ""
    """A pattern of the places that may differ; if it is empty, all may."""
    instead: str
    """What we do instead, and why."""


def explanation_of(
    vector: Vector, got: Mapping[str, Any], found: Sequence[str]
) -> tuple[str, list[str]]:
    """Return why an answer may differ at the places in `found`, and what remains unexplained; no reason is ""."""
    concerning = [difference for difference in DIFFERENCES if difference.concerns(vector)]
    used = {
        where: next((row for row in concerning if re.match(row.only, where)), None)
        for where in found
    }
    rows = [row for row in DIFFERENCES if row in used.values()]
    owed = [where for where, row in used.items() if row is None]
    for row in rows:
        owed += row.broken_promises(vector, got)
    return "; ".join(f"{row.name}: {row.instead}" for row in rows), owed


def _refused_as(*classes: str) -> Callable[[Vector, Mapping[str, Any]], Iterator[str]]:
    def broken(_vector: Vector, got: Mapping[str, Any]) -> Iterator[str]:
        found = got.get("error", {}).get("class")
        if found not in classes:
            yield f"promised a refusal as {' or '.join(classes)}, got {found or 'an answer'}"

    return broken


def _specs(vector: Vector) -> Mapping[str, Mapping[str, Any]]:
    given = vector["input"].get("plan", vector["input"])
    specs: Mapping[str, Mapping[str, Any]] = given.get("specs", {})
    return specs


# Compressed layers whose kernel blocks hold no whole state.


def _splits_states(vector: Vector) -> bool:
    if vector["op"] != "allocate_views":
        return False
    given = vector["input"]
    return any(
        _is_compressed(given["specs"][spec])
        and kernel < given["specs"][spec]["block_size"]
        and kernel % given["specs"][spec]["tokens_per_state"] != 0
        for group, kernel in zip(given["groups"], given["kernel_block_sizes"], strict=True)
        for _, spec in group
    )


def _is_compressed(spec: Mapping[str, Any]) -> bool:
    ratio = spec.get("tokens_per_state")
    return isinstance(ratio, int) and ratio > 1


# Sliding-window latent layers that the reference merges although they keep different bytes.

_MERGE_IGNORES = (
    "head_size",
    "head_size_v",
    "block_size",
    "dtype",
    "num_kv_heads",
    "num_head_slots",
    "state_content_bytes",
    "page_size_padded",
    "alignment",
    "kv_quant_mode",
)
_MERGE_COMPARES = (
    "cache_dtype_str",
    "tokens_per_state",
    "model_version",
    "sliding_window",
    "bounded_replay",
    "block_stride_alignment",
    "dcp_sharded",
    "max_tp_shards",
)


def _merges_unequal_windows(vector: Vector) -> bool:
    if vector["op"] not in ("plan", "offload_plan", "merge_specs"):
        return False
    specs = _specs(vector)
    found: Sequence[Mapping[str, Any]] = (
        vector["input"]["specs"] if vector["op"] == "merge_specs" else list(specs.values())
    )
    windows = [spec for spec in found if spec["type"] == "sliding_window_mla"]
    return any(
        all(one[name] == other[name] for name in _MERGE_COMPARES if name in one and name in other)
        and any(one.get(name) != other.get(name) for name in _MERGE_IGNORES)
        for one, other in combinations(windows, 2)
    )


def _every_page_is_its_own(vector: Vector, got: Mapping[str, Any]) -> Iterator[str]:
    """Check that no layer has another layer's page; the laws of plans are checked with every plan."""
    if "error" in got:
        if got["error"]["class"].startswith("UNHANDLED_"):
            yield "promised a plan or a refusal, got a fault"
        return
    if vector["op"] == "merge_specs":
        yield from _refused_as("SPECS_NOT_MERGEABLE")(vector, got)


# Ranks with different bytes that share host memory.


def _ranks_differ(vector: Vector) -> bool:
    return vector["op"] == "offload_plan" and vector["expected"].get("ranks_agree") is False


def _ranks_agree(vector: Vector, got: Mapping[str, Any]) -> Iterator[str]:
    if "error" in got or got.get("ranks_agree") is not True:
        yield "promised ranks that agree"
        return
    workers = got["workers"]
    cells = [worker["worker_kv_bytes_per_block"] * worker["blocks_per_chunk"] for worker in workers]
    chunks = {worker["num_chunks"] for worker in workers}
    budget = vector["input"]["extra_config"]["cpu_bytes_to_use"]
    if len(chunks) != 1 or chunks.pop() * sum(cells) > budget:
        yield "promised slots of all ranks' cells together, within the budget"


# The parts of a block that are copied.


def _regions_go_wrong(vector: Vector) -> bool:
    """Recognise strides wider than pages outside of packed blocks, and packed blocks of states only."""
    if vector["op"] != "transfer_regions":
        return False
    given = vector["input"]
    specs = [given["specs"][spec] for group in given["groups"] for _, spec in group]
    only_states = all(spec["type"] == "mamba" for spec in specs)
    if given["kv_cache_layout"].startswith("B"):
        return only_states
    return any(spec["block_stride_alignment"] is not None for spec in specs)


def _regions_cover_every_page(vector: Vector, got: Mapping[str, Any]) -> Iterator[str]:
    if "error" in got:
        yield "promised regions"
        return
    given = vector["input"]
    refs = [len(group) for group in got["group_refs"]]
    whole = given["kv_cache_layout"].startswith("B")
    wanted = [1 if whole else len(group) for group in given["groups"]]
    if refs != wanted:
        yield f"promised {wanted} regions by group, got {refs}"
    for region in got["regions"]:
        end = region["offset"] + (region["num_blocks"] - 1) * region["block_stride"]
        if not region["page_size_bytes"] <= region["block_stride"]:
            yield "promised pages that do not reach into the next block"
        if end + region["page_size_bytes"] > got["allocation_bytes"]:
            yield "promised pages within the allocation"


# What the reference forgets when it merges latent layers.


def _merges_latent_layers(vector: Vector) -> bool:
    given = vector["input"].get("plan", vector["input"])
    found = given.get("specs", {})
    specs = found if isinstance(found, list) else list(found.values())
    return vector["op"] in ("plan", "merge_specs") and any(
        spec["type"] in ("mla_attention", "hidden_state") for spec in specs
    )


def _answers_all_the_same(_vector: Vector, got: Mapping[str, Any]) -> Iterator[str]:
    if "error" in got:
        yield "promised an answer"


# Pipeline stages on which a group of unequal layers keeps nothing.


def _groups_end_on_stages(vector: Vector) -> bool:
    if vector["op"] not in ("plan", "offload_plan"):
        return False
    expected = vector["expected"].get("workers", [])
    return any(
        {name for tensor in worker["tensors"] for name in tensor["layers"]}
        != {name for group in worker["group_layers"] for name in group}
        for worker in expected
        if "tensors" in worker
    )


def _places_own_layers_only(_vector: Vector, got: Mapping[str, Any]) -> Iterator[str]:
    if "error" in got:
        yield "promised a plan"
        return
    for worker in got["workers"]:
        placed = [name for tensor in worker["tensors"] for name in tensor["layers"]]
        if sorted(placed) != sorted(name for group in worker["group_layers"] for name in group):
            yield "promised that each rank places its own layers, each once"


def _has_stages(vector: Vector) -> bool:
    config: Mapping[str, int] = vector["input"].get("config", {})
    return vector["op"] == "plan" and config["pipeline_parallel_size"] > 1


def _replicas_divide(vector: Vector, got: Mapping[str, Any]) -> Iterator[str]:
    if "error" in got or vector["expected"]["kv_tp_replicas"] % got["kv_tp_replicas"]:
        yield "promised a number of replicas that all stages share"


# Groups whose blocks are pages in one answer and parts of pages in the other.


def _blocks_would_overlap(vector: Vector) -> bool:
    if vector["op"] not in ("plan", "offload_plan"):
        return False
    given = vector["input"].get("plan", vector["input"])
    layout: str = given.get("kv_cache_layout") or given["config"]["kv_cache_layout"]
    specs = given["specs"].values()
    if layout == "LHBNC" and len({_head_slots(spec) for spec in specs}) > 1:
        return True
    spacings = [spec["block_stride_alignment"] for spec in specs]
    return layout.startswith("L") and any(spacing != spacings[0] for spacing in spacings)


def _head_slots(spec: Mapping[str, Any]) -> int:
    slots: int = spec.get("num_head_slots") or spec.get("num_kv_heads", 1)
    return slots


DIFFERENCES = (
    Difference(
        name="kernel blocks without whole states",
        concerns=_splits_states,
        broken_promises=_refused_as(
            "KERNEL_BLOCK_WITHOUT_STATES",
            "KERNEL_BLOCK_SPLITS_STATE",
            "PADDED_OR_PACKED_BLOCK_NOT_SPLITTABLE",
        ),
        only=r"\.error",
        instead="refuses kernel blocks that hold no whole state, where the reference makes views of nothing",
    ),
    Difference(
        name="unequal windows merged",
        concerns=_merges_unequal_windows,
        broken_promises=_every_page_is_its_own,
        instead="gives each layer its own page, where the reference gives all the first one's",
    ),
    Difference(
        name="one geometry of slots",
        concerns=_ranks_differ,
        broken_promises=_ranks_agree,
        instead="lays all ranks' cells into one slot, where the reference's ranks overwrite each other",
    ),
    Difference(
        name="regions of all layers",
        concerns=_regions_go_wrong,
        broken_promises=_regions_cover_every_page,
        instead="copies the whole block, where the reference copies one layer or takes the page for the stride",
    ),
    Difference(
        name="blocks that lie over others",
        concerns=_blocks_would_overlap,
        broken_promises=_refused_as("LAYOUT_CANNOT_EXPRESS_MIXED_PAGES"),
        only=r"\.error",
        instead="refuses groups whose blocks would lie over blocks of other numbers, which the reference allocates",
    ),
    Difference(
        name="layers of other stages",
        concerns=_groups_end_on_stages,
        broken_promises=_places_own_layers_only,
        only=r"\.workers\[\d+\]\.(tensors|regions)",
        instead="places on a rank only layers that it keeps, where the reference also places those of other stages",
    ),
    Difference(
        name="nothing forgotten in merging",
        concerns=_merges_latent_layers,
        broken_promises=_answers_all_the_same,
        only=r"(\.merged|\.groups\[\d+\]\.spec)\.(sliding_window|non_causal):",
        instead="keeps what merged latent layers say of windows and causality",
    ),
    Difference(
        name="replicas of all stages",
        concerns=_has_stages,
        broken_promises=_replicas_divide,
        only=r"\.kv_tp_replicas:",
        instead="counts replicas over all layers of the model, where the reference asks its first worker's",
    ),
)
"""Every way in which we differ."""
