"""Answer the vectors about the choice of a layout."""

from typing import Any

from kvlease.layout import Layout, parse_layout
from kvleased.planning.kernels.layout_choice import choose_layout, common_layouts
from tests.golden.words import spec_of

_AXES = "LBHNC"


def resolve_layout(given: dict[str, Any]) -> dict[str, Any]:
    """Return the candidates and the chosen layout."""
    declared = [
        None if names is None else [parse_layout(name) for name in names]
        for names in given["backend_layouts"]
    ]
    choice = choose_layout(
        [spec_of(words, f"layer.{index}") for index, words in enumerate(given["specs"])],
        declared,
        requested=given["requested"] or "",
        preferred=given["connector_preference"] or "",
        of_other_ranks=_of_other_ranks(given, common_layouts(declared)),
    )
    layout = choice.layout
    return {
        "candidates": [str(candidate) for candidate in choice.candidates],
        "layout": str(layout),
        "stride_order": [_AXES.index(axis) for axis in layout],
        "layer_view_order": [_AXES[1:].index(axis) for axis in layout if axis != "L"],
        "is_block_outermost": layout.is_block_outermost,
        "is_layer_compact": layout.is_layer_outermost,
        "is_block_compact": layout.is_block_compact,
    }


def _of_other_ranks(given: dict[str, Any], same: tuple[Layout, ...]) -> list[tuple[Layout, ...]]:
    """Return the layouts of the ranks after the first: the same, except for a last rank that a vector lets disagree."""
    others = [same] * (given["num_workers"] - 1)
    if given["worker_override"] is not None:
        others[-1:] = [tuple(parse_layout(name) for name in given["worker_override"])]
    return others
