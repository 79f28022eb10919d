"""Own what blocks, pools and slots are made of, as terms that explain themselves; the plan owns the numbers."""

from collections.abc import Iterable, Iterator
from math import lcm

from kvlease.plan import CachePlan, LayerPlacement, PlanInputs, RankPlan, TensorPlan
from kvlease.units import BYTES_PER_DISK_HEADER, BYTES_PER_SECTOR
from kvleased.planning.explaining.terms import (
    Term,
    floor,
    least,
    literal,
    most,
    number,
    round_up,
    total,
)
from kvleased.planning.pool import widest_element_bytes

_PAGES = "sum of pages of the largest group"


def different_ranks(plan: CachePlan) -> tuple[tuple[RankPlan, tuple[int, ...]], ...]:
    """Return one rank of each kind that keeps something, with the numbers of all ranks that keep the same."""
    found: list[tuple[RankPlan, list[int]]] = []
    for rank in plan.ranks:
        for known, numbers in found:
            if known.layers is rank.layers or known.layers == rank.layers:
                numbers.append(rank.rank)
                break
        else:
            found.append((rank, [rank.rank]))
    return tuple((rank, tuple(numbers)) for rank, numbers in found if rank.layers)


def block_term(rank: RankPlan, plan: CachePlan, inputs: PlanInputs) -> Term:
    """Return the bytes of one block on a rank: those of the group whose pages take the most."""
    specs = {layer.name: layer for layer in rank.layers}
    groups: dict[int, list[TensorPlan]] = {}
    for tensor in rank.tensors:
        groups.setdefault(tensor.group, []).append(tensor)
    if not plan.layout.is_block_outermost:
        return most([_padded_pages(runs, specs) for runs in groups.values()]).by(_PAGES)
    widest = most([_packed_pages(runs, specs) for runs in groups.values()]).by(_PAGES)
    multiple = lcm(inputs.block_multiple_bytes, *_multiples(rank))
    if multiple == inputs.block_multiple_bytes:
        return round_up(widest, number("block_multiple_bytes", multiple))
    return round_up(widest, number("lcm of all multiples", multiple))


def num_blocks_term(plan: CachePlan, inputs: PlanInputs) -> Term:
    """Return the blocks of every rank's pool: as many as the rank with the least room can have."""
    keeping = [rank for rank in plan.ranks if rank.layers]
    if not keeping:
        # Blocks of no bytes, whatever was asked for: one, or as many as are never granted.
        return most([literal(1), number("null_blocks", plan.null_blocks)])
    if inputs.device_blocks:
        return number("device_blocks as given", inputs.device_blocks)
    rooms: dict[tuple[int, int], Term] = {}
    for rank in keeping:
        budget = _budget(rank.rank, inputs)
        rooms[budget, rank.bytes_per_block] = floor(
            number("device_bytes", budget) / number("bytes_per_block", rank.bytes_per_block)
        )
    room = least(list(rooms.values()))
    return (
        room.by(f"least over ranks of {next(iter(rooms.values())).formula}")
        if len(rooms) > 1
        else room
    )


def kernel_stride_term(plan: CachePlan, group: int) -> Term:
    """Return the kernel blocks from one block of a group to the next, if other layers' pages lie between."""
    layer = next(layer for rank in plan.ranks for layer in rank.layers if layer.group == group)
    parts = number("kernel_blocks_per_block", plan.groups[group].kernel_blocks_per_block)
    content = number("bytes_per_page without padding", layer.spec.content_bytes_per_page)
    return number("block_stride_bytes", layer.block_stride_bytes) / (content / parts)


def slot_term(plan: CachePlan, inputs: PlanInputs) -> Term:
    """Return the bytes of one slot of the host pool: all cells, with one cell for all ranks that keep equal bytes."""
    cells: dict[int, int] = {rank.slot_cell_offset_bytes: 0 for rank in plan.ranks}
    for rank in plan.ranks:
        cells[rank.slot_cell_offset_bytes] = max(
            cells[rank.slot_cell_offset_bytes], rank.slot_cell_bytes
        )
    sizes = list(cells.values())
    terms = [
        number("cells", sizes.count(size)) * number("slot_cell_bytes", size)
        for size in dict.fromkeys(sizes)
    ]
    content = total(terms) if len(terms) == 1 else total(terms).by("sum of slot_cell_bytes")
    return round_up(content, number("slot_multiple_bytes", inputs.slot_multiple_bytes))


def tier_terms(plan: CachePlan, inputs: PlanInputs) -> Iterator[tuple[str, Term]]:
    """Yield the slots of every lower tier that has any."""
    slot = number("bytes_per_slot", plan.bytes_per_slot)
    sector = literal(BYTES_PER_SECTOR)
    if plan.num_slots:
        yield "num_slots", floor(number("host_bytes", inputs.host_bytes) / slot)
    if plan.num_disk_slots:
        disk_slot = round_up(slot, sector) + literal(BYTES_PER_DISK_HEADER)
        slots_bytes = number("disk_bytes", inputs.disk_bytes) - sector
        yield "num_disk_slots", floor(slots_bytes / disk_slot)
    if plan.num_remote_slots:
        yield "num_remote_slots", floor(number("remote_bytes", inputs.remote_bytes) / slot)


def _budget(rank: int, inputs: PlanInputs) -> int:
    own = inputs.ranks[rank].device_bytes if inputs.ranks else None
    return inputs.device_bytes if own is None else own


def _packed_pages(runs: Iterable[TensorPlan], specs: dict[str, LayerPlacement]) -> Term:
    """Return the bytes of a group's pages in a row, each run starting at a boundary of its elements."""
    end: Term | None = None
    for run in runs:
        layer = specs[run.layer_names[0]]
        pages = number("layers", len(run.layer_names)) * number(
            "bytes_per_page", layer.bytes_per_page
        )
        if end is not None and end.value != run.offset_bytes:
            end = round_up(end, number("bytes_per_element", widest_element_bytes(layer.spec)))
        end = pages if end is None else end + pages
    assert end is not None, "a group has a run"
    return end


def _padded_pages(runs: Iterable[TensorPlan], specs: dict[str, LayerPlacement]) -> Term:
    """Return the bytes of a group's pages, each padded to the distance of blocks."""
    terms = []
    for run in runs:
        layer = specs[run.layer_names[0]]
        page_bytes = max(layer.bytes_per_page, run.block_stride_bytes)
        terms.append(number("layers", len(run.layer_names)) * number("bytes_per_page", page_bytes))
    return total(terms)


def _multiples(rank: RankPlan) -> set[int]:
    """Return numbers that divide the distance of blocks, so that each page starts where kernels can read it."""
    elements: dict[int, set[int]] = {}
    for layer in rank.layers:
        elements.setdefault(layer.group, set()).add(widest_element_bytes(layer.spec))
    mixed = {size for sizes in elements.values() if len(sizes) > 1 for size in sizes}
    return mixed | {layer.spec.block_stride_multiple for layer in rank.layers}
