"""Own how a plan reads on a terminal of any width: what fits first, then groups, equations, waste and what-ifs."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvlease.cli import plan_words as words
from kvlease.errors import KVLeaseError
from kvlease.plan import CachePlan, GroupPlan, Waste
from kvlease.plan_report import WAY_OUT, Equation, PlanOutcome, PlanReport, WhatIf
from kvlease.units import show_bytes

_WIDE: Final = 100
"""Columns from which tables show numbers that are nice to have."""
_VALUE_COLUMNS: Final = 26
"""Columns that a number, its unit and the gaps beside it take at most."""
_OPTIONS: Final = {
    "device_bytes": "--device-memory",
    "host_bytes": "--host-memory",
    "disk_bytes": "--disk",
    "remote_bytes": "--remote",
    "longest_request_tokens": "--longest-request",
}
"""The options that are not called as their settings are."""
_OTHERS: Final = frozenset({
    "device_blocks", "null_blocks", "tokens_per_block", "tokens_per_step", "kv_dtype", "layout", "tensor_ranks",
    "pipeline_ranks", "context_ranks", "state_mode",
})  # fmt: skip
"""The options that are."""


def answer(
    plan: CachePlan, report: PlanReport, what_ifs: Sequence[WhatIf], *, width: int
) -> Iterator[RenderableType]:
    """Yield the parts of the answer, in the order in which people read them."""
    yield _titled("What fits", summary(plan))
    yield _titled("Groups", groups(plan, width))
    yield _titled("Where the numbers come from", equations(report.equations, width))
    yield _titled("What is wasted", waste(plan))
    if what_ifs:
        yield _titled("What if", what_if_table(what_ifs, width))


def refusal(error: KVLeaseError) -> Iterator[RenderableType]:
    """Yield why there is no plan, and what would work."""
    sentence = error.message.partition(WAY_OUT)[0]
    yield Text(f"{error.code}: {sentence}", style="red")
    if error.remedies:
        yield Text("\nWhat would work:")
        for remedy in error.remedies:
            yield Text(f"  - {_as_option(remedy)}")


def summary(plan: CachePlan) -> RenderableType:
    """Return what fits, one line for each question that people ask first."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for line in words.summary(plan):
        table.add_row(*line)
    return table


def groups(plan: CachePlan, width: int) -> RenderableType:
    """Return one row for every kind of group: what it keeps, and what a request takes of it."""
    is_wide = width >= _WIDE
    wide = ("kernel blocks", "table") if is_wide else ()
    table = _table("group", "keeps", "layers", "tokens a block", "page", "a request takes", *wide)
    rows: dict[tuple[str, ...], list[int]] = {}
    for index, group in enumerate(plan.groups):
        rows.setdefault(_group_row(group, is_wide), []).append(index)
    for row, indexes in rows.items():
        table.add_row(words.numbers(indexes), *row)
    return table


def equations(found: Iterable[Equation], width: int) -> RenderableType:
    """Return every number with its formula and the same in numbers, in one line where that fits."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(ratio=1, overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for equation in found:
        said = Text(equation.name, style="bold")
        said.append(words.whose(equation), style="not bold cyan")
        table.add_row(said, words.value(equation))
        lines = [f"= {equation.formula}", f"= {equation.arithmetic}"]
        if equation.arithmetic in (equation.formula, str(equation.value)):
            lines = lines[:1]
        one_line = " ".join(lines)
        fits = len(one_line) <= width - _VALUE_COLUMNS
        text = Text(one_line if fits else "\n".join(lines), style="dim")
        table.add_row(Padding(text, (0, 0, 0, 2)), Text(words.rounded(equation), style="dim"))
    return table


def waste(plan: CachePlan) -> RenderableType:
    """Return the bytes that hold nothing, by cause."""
    if not plan.waste:
        return Text("nothing: every byte can hold something")
    table = _table("tier", "cause", "bytes", "share", "why")
    for found in plan.waste:
        table.add_row(
            found.tier,
            found.cause,
            show_bytes(found.num_bytes),
            _share(plan, found),
            found.why,
        )
    return table


def what_if_table(what_ifs: Sequence[WhatIf], width: int) -> RenderableType:
    """Return the plan as asked for, and one row for every change; refused ones are told below."""
    before = what_ifs[0].before
    more: list[str] = []
    if width >= _WIDE:
        more.append("a block")
    if any(outcome.num_slots for outcome in (before, *(change.after for change in what_ifs))):
        more.append("host slots")
    table = _table("change", "blocks", "at once", "capacity", "longest", *more)
    table.add_row("as asked for", *_outcome(before, before, more), style="bold")
    told: list[RenderableType] = []
    for change in what_ifs:
        name = words.change(change.change)
        if change.after.refusal:
            told.append(Text(f"{name}: {change.after.refusal}", style="red"))
        else:
            table.add_row(name, *_outcome(change.after, before, more))
    return Group(table, *told)


def _group_row(group: GroupPlan, is_wide: bool) -> tuple[str, ...]:
    wide = (
        (
            f"{group.kernel_blocks_per_block} of {group.kernel_tokens_per_block:,} tokens",
            f"{group.table_blocks:,} entries",
        )
        if is_wide
        else ()
    )
    return (
        words.keeps(group),
        str(len(group.layer_names)),
        f"{group.tokens_per_block:,}",
        show_bytes(group.bytes_per_page),
        f"{group.blocks_per_longest_request:,} blocks",
        *wide,
    )


def _outcome(outcome: PlanOutcome, before: PlanOutcome, more: Sequence[str]) -> tuple[str, ...]:
    shown = {
        "a block": show_bytes(outcome.bytes_per_block),
        "host slots": f"{outcome.num_slots:,}",
    }
    return (
        f"{outcome.num_blocks:,}",
        words.times(outcome.concurrency, before.concurrency),
        f"{outcome.capacity_tokens:,}",
        f"{outcome.largest_request_tokens:,}",
        *(shown[column] for column in more),
    )


def _share(plan: CachePlan, found: Waste) -> str:
    whole = plan.host_bytes if found.tier == "host" else plan.device_bytes
    return f"{found.num_bytes / whole:.1%}" if whole else ""


def _as_option(setting: str) -> str:
    """Return a setting as the command line takes it."""
    name, _, value = setting.partition("=")
    option = _OPTIONS.get(name, f"--{name.replace('_', '-')}" if name in _OTHERS else "")
    written = f"{option} {value}" if option else setting
    return f"{written}  ({show_bytes(int(value))})" if name.endswith("_bytes") else written


def _titled(title: str, part: RenderableType) -> RenderableType:
    return Group(Text(title, style="bold underline"), part, Text(""))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        is_text = column in {"group", "keeps", "tier", "cause", "why", "change"}
        table.add_column(
            column,
            justify="left" if is_text else "right",
            no_wrap=not is_text or column in {"cause", "tier", "group"},
            overflow="fold",
        )
    return table
