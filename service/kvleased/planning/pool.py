"""Own where every page lies in a rank's region: the bytes of a block, the layers' places, the pieces of a block.

All groups lie over each other from byte 0, because a block belongs to one group at a time. So block b must lie in the
same place for every group.

blocks outermost: bytes_per_block = round_up(max over groups of the sum of pages, lcm of all stride multiples)
layers outermost: bytes_per_block = max over groups of the sum of padded pages
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final

from kvlease.errors import InvalidError
from kvlease.geometry import round_up
from kvlease.layout import Layout
from kvlease.plan import Extent, LayerPlacement, TensorPlan
from kvlease.spec import BYTES_PER_ELEMENT, LayerSpec, StateSpace
from kvlease.strides import PageStrides, page_strides
from kvleased.planning.groups.grouping import Group

Places = tuple[tuple[LayerPlacement, ...], tuple[TensorPlan, ...], tuple[Extent, ...]]
"""The layers' places, the runs of equal layers, and the pieces of a block."""

PIECES_MAX: Final = 2**16
"""The most pieces of one block. Where heads are outside of blocks, each head of each layer is a piece."""

_MIXED_PAGES: Final = "layout_cannot_express_mixed_pages"
_COMPACT: Final = f"a layout whose two outermost axes are L and B, such as {Layout.BLHNC}"
_PACKED: Final = f"a layout with B outermost, such as {Layout.BLHNC}"


def bytes_per_block(groups: Sequence[Group], layout: Layout, block_multiple_bytes: int) -> int:
    """Return the bytes of one block over all its pieces; 0 if no group has a layer."""
    return _bytes_per_block([_runs(group) for group in groups], layout, block_multiple_bytes)


def bytes_in_block(group: Group, layout: Layout) -> int:
    """Return the bytes that the pages of one group take of a block."""
    return _bytes_of(_runs(group), layout)


def check_layout(groups: Sequence[Group], layout: Layout) -> None:
    """Refuse groups whose pages the layout cannot lay over each other.

    Raises:
        InvalidError: it cannot; the message names the layouts that can.
    """
    runs = [run for group in groups for run in _runs(group)]
    pages = {run.page_bytes for run in runs}
    if len(pages) > 1 and not layout.is_block_compact:
        raise _mixed_pages(f"pages of {_listed(pages)} bytes", layout, _COMPACT)
    if len(pages) > 1 and len(groups) > 1 and layout.is_layer_outermost:
        raise _mixed_pages(f"groups with pages of {_listed(pages)} bytes", layout, _PACKED)


def check_blocks_apart(groups: Sequence[Group], layout: Layout) -> None:
    """Refuse groups that the layout can place, but so that a block of one group would overwrite blocks of another.

    This happens if their pages are at different distances, or if each head lies by itself and groups have different
    heads.

    Raises:
        InvalidError: rule layout_cannot_express_mixed_pages; or too_many_pieces, if heads lie by themselves and there
            are too many. The message names other layouts.
    """
    if layout.is_block_outermost:
        return
    padded = {run.padded_page_bytes for group in groups for run in _runs(group)}
    if len(padded) > 1 and len(groups) > 1:
        raise _mixed_pages(f"groups with pages of {_listed(padded)} bytes", layout, _PACKED)
    if layout.is_block_compact:
        return
    num_pieces = max(
        (sum(layer.head_slots for layer in group.layers) for group in groups), default=0
    )
    if num_pieces > PIECES_MAX:
        message = (
            f"in layout {layout}, a block has {num_pieces} pieces, one for each head of each layer, but at most "
            f"{PIECES_MAX} are supported; use {_COMPACT}"
        )
        raise InvalidError(
            message,
            resource="layout",
            rule="too_many_pieces",
            need=num_pieces,
            limit=PIECES_MAX,
        )
    heads = {layer.head_slots for group in groups for layer in group.layers}
    if len(heads) > 1 and len(groups) > 1:
        raise _mixed_pages(f"groups with pages of {_listed(heads)} heads", layout, _COMPACT)


def place(
    groups: Sequence[Group], *, layout: Layout, num_blocks: int, block_multiple_bytes: int
) -> Places:
    """Return where the layers of every group lie in a region of `num_blocks` blocks, and the pieces of a block.

    Raises:
        InvalidError: the layout has no room for the padding of a page, or cannot take its pages apart.
    """
    runs_by_group = [_runs(group) for group in groups]
    block = _bytes_per_block(runs_by_group, layout, block_multiple_bytes)
    layers: list[LayerPlacement] = []
    tensors: list[TensorPlan] = []
    pieces: set[tuple[int, int, int]] = set()
    for index, runs in enumerate(runs_by_group):
        start = 0
        for run in runs:
            start = round_up(start, run.element_bytes)
            strides = _strides(run, layout, num_blocks, block)
            placed = list(_placements(run, index, start, strides))
            layers += placed
            tensors.append(_tensor(run, index, start, strides))
            if layout.is_block_outermost:
                start += run.bytes_packed
            else:
                pieces.update(_pieces(run, placed, layout))
                start += run.padded_bytes * num_blocks
    if layout.is_block_outermost and block:
        pieces = {(0, block, block)}
    return tuple(layers), tuple(tensors), _in_slot(pieces)


def widest_element_bytes(spec: LayerSpec) -> int:
    """Return the bytes of the widest element in a page; the tensors of a recurrent state may have different types."""
    if isinstance(spec, StateSpace):
        return max(BYTES_PER_ELEMENT[dtype] for dtype in spec.dtypes)
    return spec.bytes_per_element


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Layers of one group with equal specs."""

    spec: LayerSpec
    layers: tuple[LayerSpec, ...]
    page_bytes: int
    element_bytes: int
    """The widest element of a page."""
    multiple_bytes: int
    """The distance of blocks is a multiple of this, so that each page starts at an element of its own type."""

    @property
    def padded_page_bytes(self) -> int:
        return round_up(self.page_bytes, self.multiple_bytes)

    @property
    def bytes_packed(self) -> int:
        return len(self.layers) * self.page_bytes

    @property
    def padded_bytes(self) -> int:
        return len(self.layers) * self.padded_page_bytes


def _runs(group: Group) -> list[_Run]:
    """Return the group's layers by equal specs, in order of first appearance."""
    by_spec: dict[LayerSpec, list[LayerSpec]] = {}
    for layer in group.layers:
        by_spec.setdefault(layer, []).append(layer)
    elements = {widest_element_bytes(spec) for spec in by_spec}
    # If layers with other elements follow, a block must not end within one of their elements.
    others = elements if len(elements) > 1 else ()
    return [
        _Run(
            spec=spec,
            layers=tuple(layers),
            page_bytes=spec.bytes_per_page,
            element_bytes=widest_element_bytes(spec),
            multiple_bytes=lcm(spec.block_stride_multiple, *others),
        )
        for spec, layers in by_spec.items()
    ]


def _bytes_per_block(
    runs_by_group: Sequence[Sequence[_Run]], layout: Layout, block_multiple_bytes: int
) -> int:
    widest = max((_bytes_of(runs, layout) for runs in runs_by_group), default=0)
    if not widest or not layout.is_block_outermost:
        return widest
    multiples = {
        lcm(run.multiple_bytes, run.element_bytes) for runs in runs_by_group for run in runs
    }
    return round_up(widest, lcm(block_multiple_bytes, *multiples))


def _bytes_of(runs: Iterable[_Run], layout: Layout) -> int:
    """Return the bytes that one block of a group takes, before any rounding of the block."""
    end = 0
    for run in runs:
        if layout.is_block_outermost:
            end = round_up(end, run.element_bytes) + run.bytes_packed
        else:
            end += run.padded_bytes
    return end


def _fixed_stride(run: _Run, layout: Layout) -> int | None:
    """Return the distance of blocks if it is more than the page; None if the layout gives it."""
    if run.padded_page_bytes == run.page_bytes:
        return None
    if layout.is_block_compact:
        return run.padded_page_bytes
    message = (
        f"layer {run.spec.name!r} pads its pages of {run.page_bytes} bytes to {run.padded_page_bytes}, for which "
        f"layout {layout} has no room; use {_COMPACT}"
    )
    raise InvalidError(
        message,
        resource="layout",
        rule="layout_cannot_pad_pages",
        need=run.padded_page_bytes,
        available=run.page_bytes,
    )


def _strides(run: _Run, layout: Layout, num_blocks: int, block_bytes: int) -> PageStrides:
    stride = block_bytes if layout.is_block_outermost else _fixed_stride(run, layout)
    return page_strides(
        run.spec,
        num_layers=len(run.layers),
        num_blocks=num_blocks,
        layout=layout,
        fixed={} if stride is None else {"B": stride},
    )


def _placements(
    run: _Run, group: int, start: int, strides: PageStrides
) -> Iterator[LayerPlacement]:
    for index, layer in enumerate(run.layers):
        yield LayerPlacement(
            name=layer.name,
            group=group,
            offset_bytes=start + index * strides.layer_stride_bytes,
            block_stride_bytes=strides.block_stride_bytes,
            bytes_per_page=run.page_bytes,
            head_stride_bytes=strides.head_stride_bytes,
            state_stride_bytes=strides.state_stride_bytes,
            spec=layer,
        )


def _tensor(run: _Run, group: int, start: int, strides: PageStrides) -> TensorPlan:
    return TensorPlan(
        group=group,
        layer_names=tuple(layer.name for layer in run.layers),
        offset_bytes=start,
        layer_stride_bytes=strides.layer_stride_bytes,
        block_stride_bytes=strides.block_stride_bytes,
    )


def _pieces(
    run: _Run, placed: Sequence[LayerPlacement], layout: Layout
) -> Iterator[tuple[int, int, int]]:
    """Yield offset, stride and bytes of a block's pieces: pages, or heads if those lie outside of blocks."""
    for layer in placed:
        heads = 1 if layout.is_block_compact else run.spec.head_slots
        for head in range(heads):
            offset = layer.offset_bytes + head * layer.head_stride_bytes
            yield offset, layer.block_stride_bytes, layer.block_stride_bytes


def _in_slot(pieces: Iterable[tuple[int, int, int]]) -> tuple[Extent, ...]:
    """Return the pieces in order of offset, each after the other in the slot."""
    extents: list[Extent] = []
    slot_offset = 0
    for offset, stride, num_bytes in sorted(pieces):
        extents.append(
            Extent(
                offset_bytes=offset,
                block_stride_bytes=stride,
                num_bytes=num_bytes,
                slot_offset_bytes=slot_offset,
            )
        )
        slot_offset += num_bytes
    return tuple(extents)


def _mixed_pages(what: str, layout: Layout, way_out: str) -> InvalidError:
    message = f"{what} cannot share blocks in layout {layout}; use {way_out}"
    return InvalidError(message, resource="layout", rule=_MIXED_PAGES)


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(str(number) for number in sorted(numbers))
