"""Own the choice of one layout for all ranks; `kvlease.strides` owns what a layout means for strides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvlease.errors import InvalidError
from kvlease.layout import Layout, parse_layout
from kvlease.spec import AttentionSpec, LayerSpec

LAYOUTS_BY_DEFAULT: Final = (
    Layout.LBNHC,
    Layout.LBHNC,
    Layout.BLNHC,
    Layout.BLHNC,
    Layout.BHLNC,
    Layout.LHBNC,
)
"""The layouts that a rank can have if no backend says what it reads, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """A layout, and what it was chosen from."""

    candidates: tuple[Layout, ...]
    """The layouts that all backends read, best first."""
    layout: Layout


def choose_layout(
    specs: Sequence[LayerSpec],
    backend_layouts: Sequence[Sequence[Layout] | None],
    *,
    requested: str = "",
    preferred: str = "",
    of_other_ranks: Sequence[Sequence[Layout]] = (),
) -> LayoutChoice:
    """Return the requested layout, else the preferred one if it is possible, else the first possible one.

    `backend_layouts` has the layouts that each backend reads, or None if it does not say; `of_other_ranks` has the
    candidates of the other ranks. An impossible preference, such as a connector's, is passed over, while an impossible
    request is refused.

    Raises:
        InvalidError: rule unknown_layout, no_common_layout, workers_disagree_on_layout, layout_needs_block_compact,
            layout_needs_block_outermost or layout_not_a_candidate.
    """
    candidates = common_layouts(backend_layouts)
    for others in of_other_ranks:
        if tuple(others) != candidates:
            message = (
                f"ranks do not agree on layouts: one can use {_listed(candidates)}, another {_listed(others)}; run the "
                "same backends on all ranks"
            )
            raise InvalidError(
                message, resource="backend_layouts", rule="workers_disagree_on_layout"
            )
    possible = _expressing(specs, candidates)
    if requested:
        layout = parse_layout(requested)
        if layout not in possible:
            message = f"layout {layout} is not among those that backends and layers allow: {_listed(possible)}"
            raise InvalidError(message, resource="layout", rule="layout_not_a_candidate")
        return LayoutChoice(candidates=candidates, layout=layout)
    if preferred and (wish := parse_layout(preferred)) in possible:
        return LayoutChoice(candidates=candidates, layout=wish)
    return LayoutChoice(candidates=candidates, layout=possible[0])


def common_layouts(backend_layouts: Sequence[Sequence[Layout] | None]) -> tuple[Layout, ...]:
    """Return the layouts that all backends of a rank read: in their order if they agree, else by how many put it first.

    Raises:
        InvalidError: rule no_common_layout.
    """
    declared = [tuple(layouts) for layouts in backend_layouts if layouts is not None]
    if not declared:
        return LAYOUTS_BY_DEFAULT
    if len(set(declared)) == 1 and declared[0]:
        return declared[0]
    common = [layout for layout in Layout if all(layout in layouts for layouts in declared)]
    if not common:
        message = (
            f"no layout is read by all backends, which read {'; '.join(map(_listed, declared))}; choose backends that "
            "have a layout in common"
        )
        raise InvalidError(message, resource="backend_layouts", rule="no_common_layout")
    firsts = [layouts[0] for layouts in declared]
    return tuple(sorted(common, key=firsts.count, reverse=True))


def _expressing(specs: Sequence[LayerSpec], candidates: Sequence[Layout]) -> Sequence[Layout]:
    """Return the candidates that can hold layers whose pages differ.

    Raises:
        InvalidError: rule layout_needs_block_compact or layout_needs_block_outermost.
    """
    possible = candidates
    shapes = {(spec.head_slots, spec.states_per_block, spec.bytes_per_page) for spec in specs}
    if len(shapes) > 1:
        possible = [layout for layout in possible if layout.is_block_compact]
        if not possible:
            message = (
                f"layers differ in heads, states or bytes of a page: (heads, states, bytes) {sorted(shapes)}; they "
                "need a layout that keeps pages whole (LBHNC, LBNHC, BLHNC or BLNHC), but the candidates are "
                f"{_listed(candidates)}"
            )
            raise InvalidError(message, resource="layout", rule="layout_needs_block_compact")
    if _shards_unevenly(specs):
        possible = [layout for layout in possible if layout.is_block_outermost]
        if not possible:
            message = (
                "some layers are split over context ranks, and others with different pages are not; they need a "
                f"layout with blocks outermost (BLHNC, BLNHC or BHLNC), but the candidates are {_listed(candidates)}"
            )
            raise InvalidError(message, resource="layout", rule="layout_needs_block_outermost")
    return possible


def _shards_unevenly(specs: Sequence[LayerSpec]) -> bool:
    """Tell whether only some layers with token slots are split over context ranks, and pages differ."""
    slotted = [spec for spec in specs if isinstance(spec, AttentionSpec) and spec.has_token_slots]
    return (
        len({spec.is_context_sharded for spec in slotted}) > 1
        and len({spec.bytes_per_page for spec in slotted}) > 1
    )


def _listed(layouts: Sequence[Layout]) -> str:
    return ", ".join(layouts) or "none"
