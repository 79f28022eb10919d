"""Own how the parts of a plan are said in words and round numbers; where they stand is `plan_tables`' business."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from kvlease.plan import CachePlan, GroupPlan
from kvlease.plan_report import Equation
from kvlease.spec import AttentionSpec
from kvlease.units import show_bytes

_ALIKE: Final = 0.005
"""A change by less than this is none to people."""


def summary(plan: CachePlan) -> Iterator[tuple[str, str]]:
    """Yield what people ask first, with its answer."""
    layers = {layer.name for rank in plan.ranks for layer in rank.layers}
    where = "" if len(plan.ranks) == 1 else f" on each of {len(plan.ranks)} ranks"
    blocks = sorted({rank.bytes_per_block for rank in plan.ranks})
    block = " to ".join(show_bytes(size) for size in dict.fromkeys((blocks[0], blocks[-1])))
    yield "model", f"{len(layers):,} layers in {_plural(len(plan.groups), 'group')}"
    never = f", {plan.null_blocks:,} of them never granted" if plan.null_blocks else ""
    yield "device", f"{plan.num_blocks:,} blocks of {block}{where}{never}"
    request_bytes = max(rank.bytes_per_longest_request for rank in plan.ranks)
    need = f"{plan.longest_request_tokens:,} tokens take {plan.blocks_per_longest_request:,} blocks"
    yield "longest request", f"{need} ({show_bytes(request_bytes)}{where})"
    yield (
        "at once",
        f"{plan.concurrency:,.2f} longest requests, {plan.capacity_tokens:,} tokens in all",
    )
    for tier, num_slots in (
        ("host", plan.num_slots),
        ("disk", plan.num_disk_slots),
        ("remote", plan.num_remote_slots),
    ):
        if num_slots:
            holds = f"{num_slots:,} slots of {_plural(plan.blocks_per_slot, 'block')}"
            yield tier, f"{holds}, {show_bytes(plan.bytes_per_slot)} each"
    key = f"a key names {plan.hash_block_tokens:,} tokens"
    yield "prefixes", f"{key}; what is found ends at a multiple of {plan.hit_alignment_tokens:,}"
    yield "layout", f"{plan.layout}, fingerprint {plan.layout_fingerprint[:12]}"


def keeps(group: GroupPlan) -> str:
    """Say what a group's layers keep."""
    spec = group.spec
    said = spec.kind.replace("_", " ").replace("mla", "MLA")
    window = getattr(spec, "window_tokens", None) or getattr(spec, "chunk_tokens", None)
    if window:
        said += f" of {window:,}"
    if isinstance(spec, AttentionSpec) and spec.tokens_per_state > 1:
        said += f", {spec.tokens_per_state} tokens a state"
    if not group.has_equal_layers:
        said += " and others"
    if not group.is_prefix_cacheable:
        said += ", not cached"
    return said + (", drafted" if group.is_drafted else "")


def whose(equation: Equation) -> str:
    """Say which groups, ranks and layers a number is of; nothing where it is of all."""
    said = ""
    if equation.groups:
        said += f"  {_of('group', equation.groups)}"
    if equation.ranks:
        said += f"  {_of('rank', equation.ranks)}"
    return said + (f"  {equation.layer}" if equation.layer else "")


def value(equation: Equation) -> str:
    """Return a number with its unit; a fraction with two decimals."""
    unit = equation.unit.removesuffix("s") if equation.exact == 1 else equation.unit
    if equation.unit == "entries" and equation.exact == 1:
        unit = "entry"
    if equation.value_divisor == 1:
        return f"{equation.value:,} {unit}"
    return f"{float(equation.exact):,.2f} {unit}"


def rounded(equation: Equation) -> str:
    """Return many bytes as people say them; nothing for other numbers."""
    is_large = equation.unit == "bytes" and equation.exact >= 2**10
    return show_bytes(int(equation.exact)) if is_large else ""


def change(setting: str) -> str:
    """Return a changed setting with its bytes as people say them."""
    name, _, written = setting.partition("=")
    if name.endswith("_bytes") and written.isdecimal():
        return f"{name}={show_bytes(int(written))}"
    return setting


def times(now: float, before: float) -> str:
    """Return a number, and how many times the former one it is."""
    if not before or abs(now / before - 1) < _ALIKE:
        return f"{now:,.2f}"
    return f"{now:,.2f} (x{now / before:.2f})"


def numbers(indexes: Sequence[int]) -> str:
    """Return numbers in order, runs by their ends: 0-3, 5."""
    runs: list[list[int]] = [[indexes[0], indexes[0]]]
    for before, after in pairwise(indexes):
        if after == before + 1:
            runs[-1][1] = after
        else:
            runs.append([after, after])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _of(what: str, indexes: Sequence[int]) -> str:
    return f"{what}{'s' if len(indexes) > 1 else ''} {numbers(indexes)}"


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
