"""Own how the parts of a plan read in words and round numbers; `tables` decides where they stand."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from kvlease.plan import CachePlan, GroupPlan
from kvlease.plan_groups import groups_of
from kvlease.plan_report import Equation
from kvlease.spec import AttentionSpec, FullAttention
from kvlease.units import show_bytes

_ALIKE: Final = 0.005
"""A change smaller than this is shown as none."""
_SHOWN: Final = 0.001
"""A share smaller than this has no digit to show."""


def summary(plan: CachePlan) -> Iterator[tuple[str, str]]:
    """Yield the questions that people ask first, with their answers."""
    layers = {layer.name for rank in plan.ranks for layer in rank.layers}
    where = "" if len(plan.ranks) == 1 else f" on each of {len(plan.ranks)} ranks"
    blocks = sorted({rank.bytes_per_block for rank in plan.ranks})
    block = " to ".join(show_bytes(size) for size in dict.fromkeys((blocks[0], blocks[-1])))
    yield "model", f"{plural(len(layers), 'layer')} in {plural(len(plan.groups), 'group')}"
    never = f", {plan.null_blocks:,} of them never granted" if plan.null_blocks else ""
    yield "device", f"{plural(plan.num_blocks, 'block')} of {block}{where}{never}"
    request_bytes = max(rank.bytes_per_longest_request for rank in plan.ranks)
    verb = "takes" if plan.longest_request_tokens == 1 else "take"
    tokens = plural(plan.longest_request_tokens, "token")
    need = f"{tokens} {verb} {plural(plan.blocks_per_longest_request, 'block')}"
    yield "longest request", f"{need} ({show_bytes(request_bytes)}{where})"
    yield (
        "at once",
        f"{plan.concurrency:,.2f} longest requests, {plural(plan.capacity_tokens, 'token')} in all",
    )
    for tier, num_slots in (
        ("host", plan.num_slots),
        ("disk", plan.num_disk_slots),
        ("remote", plan.num_remote_slots),
    ):
        if num_slots:
            holds = f"{plural(num_slots, 'slot')} of {plural(plan.blocks_per_slot, 'block')}"
            yield tier, f"{holds}, {show_bytes(plan.bytes_per_slot)} each"
    key = f"a key names {plural(plan.hash_block_tokens, 'token')}"
    yield "prefixes", f"{key}; what is found ends at a multiple of {plan.hit_alignment_tokens:,}"
    yield "layout", f"{plan.layout}, fingerprint {plan.layout_fingerprint[:12]}"
    if not plan.null_blocks and any(shape.gives_back for shape in groups_of(plan)):
        what = "places of blocks that are given back read as block 0, which must not be granted"
        yield "to register", f"set --null-blocks 1: {what}"


def keeps(group: GroupPlan) -> str:
    """Say what a group's layers keep."""
    spec = group.spec
    said = spec.kind.replace("_", " ").replace("mla", "MLA")
    window = getattr(spec, "window_tokens", None) or getattr(spec, "chunk_tokens", None)
    if window:
        # If windows share a table with layers that keep all tokens, no block of theirs is given back.
        is_whole = isinstance(spec, FullAttention)
        said += f", windows of {window:,} kept whole" if is_whole else f" of {window:,}"
    if isinstance(spec, AttentionSpec) and spec.tokens_per_state > 1:
        said += f", {spec.tokens_per_state} tokens a state"
    if not group.has_equal_layers:
        said += " and others"
    if not group.is_prefix_cacheable:
        said += ", not cached"
    return said + (", drafted" if group.is_drafted else "")


def whose(equation: Equation) -> str:
    """Say which groups, ranks and layers a number holds for; nothing if it holds for all."""
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
    """Return a large number of bytes in a readable unit; nothing for other numbers."""
    is_large = equation.unit == "bytes" and equation.exact >= 2**10
    return show_bytes(int(equation.exact)) if is_large else ""


def change(setting: str) -> str:
    """Return a changed setting, with bytes in a readable unit."""
    name, _, written = setting.partition("=")
    if name.endswith("_bytes") and written.isdecimal():
        return f"{name}={show_bytes(int(written))}"
    return setting


def times(now: float, before: float) -> str:
    """Return a number, and how many times as large as the former one it is."""
    if not before or abs(now / before - 1) < _ALIKE:
        return f"{now:,.2f}"
    return f"{now:,.2f} (x{now / before:.2f})"


def numbers(indexes: Sequence[int]) -> str:
    """Return numbers in order, with runs written by their ends: 0-3, 5."""
    runs: list[list[int]] = [[indexes[0], indexes[0]]]
    for before, after in pairwise(indexes):
        if after == before + 1:
            runs[-1][1] = after
        else:
            runs.append([after, after])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def plural(count: int, what: str) -> str:
    """Return a number with its noun: 1 block, 2 blocks, 2 entries."""
    if count == 1:
        return f"{count:,} {what}"
    return f"{count:,} {what[:-1]}ies" if what.endswith("ry") else f"{count:,} {what}s"


def budget_bytes(plan: CachePlan, tier: str) -> int:
    """Return the bytes that a tier was given: those of its blocks or slots, and those that hold nothing."""
    whole = plan.host_bytes if tier == "host" else plan.device_bytes
    beside = ("unfilled_budget", "rank_minimum")
    return whole + sum(
        found.num_bytes for found in plan.waste if found.tier == tier and found.cause in beside
    )


def share(part: int, whole: int) -> str:
    """Return a part of a whole in percent; a part that is not 0 is never shown as 0."""
    if not part or not whole:
        return "0 %"
    return f"{part / whole:.1%}".replace("%", " %") if part / whole >= _SHOWN else "< 0.1 %"


def _of(what: str, indexes: Sequence[int]) -> str:
    return f"{what}{'s' if len(indexes) > 1 else ''} {numbers(indexes)}"
