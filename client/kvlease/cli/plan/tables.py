"""Own how a plan reads on a terminal of any width: what fits first, then groups, equations, waste and what-ifs."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvlease.cli import sheets
from kvlease.cli.plan import settings, words
from kvlease.cli.plan.settings import OWN, Spelling
from kvlease.cli.sheets import Column
from kvlease.errors import KVLeaseError
from kvlease.plan import CachePlan, GroupPlan
from kvlease.plan_report import WAY_OUT, Equation, PlanOutcome, PlanReport, WhatIf
from kvlease.units import show_bytes

_GROUPS: Final = (
    Column(name="group", is_number=False),
    Column(name="keeps", is_number=False, wrapped_columns=16),
    Column(name="layers"),
    Column(name="tokens a block"),
    Column(name="page"),
    Column(name="a request takes"),
    Column(name="kernel blocks"),
    Column(name="table"),
)
_WASTE: Final = (
    Column(name="tier", is_number=False),
    Column(name="cause", is_number=False),
    Column(name="bytes"),
    Column(name="share"),
    Column(name="why", is_number=False, wrapped_columns=24),
)
_OUTCOMES: Final = ("blocks", "a block", "at once", "capacity", "longest")
_TIERS: Final = ("host slots", "disk slots", "remote slots")


def answer(
    plan: CachePlan,
    report: PlanReport,
    what_ifs: Sequence[WhatIf],
    *,
    width: int,
    spelling: Spelling = OWN,
) -> Iterator[RenderableType]:
    """Yield the parts of the answer, in the order in which people read them."""
    yield _titled("What fits", sheets.pairs(list(words.summary(plan))))
    if report.notes:
        yield _titled("Notes", notes(report.notes, spelling))
    yield _titled("Groups", groups(plan, width))
    yield _titled("Where the numbers come from", equations(report.equations, width))
    yield _titled("What is wasted", waste(plan, width))
    if what_ifs:
        yield _titled("What if", what_if_table(what_ifs, width))


def refusal(error: KVLeaseError, spelling: Spelling = OWN) -> Iterator[RenderableType]:
    """Yield why there is no plan, and which settings that the command line takes would work."""
    sentence = settings.with_options(error.message.partition(WAY_OUT)[0], spelling)
    yield Text(f"{error.code}: {sentence}", style="red")
    if remedies := [remedy for remedy in error.remedies if spelling.has(remedy) or spelling is OWN]:
        yield Text("\nWhat would work:")
        for remedy in remedies:
            yield Text(f"  - {settings.as_options(remedy, spelling)}")


def notes(found: Iterable[str], spelling: Spelling = OWN) -> RenderableType:
    """Return what may surprise people about the plan, with settings written as options."""
    return Group(*(Text(f"- {settings.with_options(note, spelling)}") for note in found))


def groups(plan: CachePlan, width: int) -> RenderableType:
    """Return one row for every kind of group: what it keeps, and how much of it a request takes."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for index, group in enumerate(plan.groups):
        rows.setdefault(_group_row(group), []).append(index)
    said = [(words.numbers(indexes), *row) for row, indexes in rows.items()]
    return sheets.sheet(_GROUPS, said, width)


def equations(found: Iterable[Equation], width: int) -> RenderableType:
    """Return every number with its formula and its arithmetic, in one line if they fit."""
    lines: list[RenderableType] = []
    for equation in found:
        said = Text(equation.name, style="bold")
        said.append(words.whose(equation), style="not bold cyan")
        lines += _beside(said, words.value(equation), width)
        formula = [f"= {equation.formula}", f"= {equation.arithmetic}"]
        if equation.arithmetic in (equation.formula, str(equation.value)):
            formula = formula[:1]
        rounded = words.rounded(equation)
        one_line = " ".join(formula)
        if len(one_line) + len(rounded) + 4 <= width:
            formula = [one_line]
        for line in formula[:-1]:
            lines.append(Padding(Text(line, style="dim"), (0, 0, 0, 2)))
        lines += _beside(Text(f"  {formula[-1]}", style="dim"), rounded, width, style="dim")
    return Group(*lines)


def waste(plan: CachePlan, width: int) -> RenderableType:
    """Return the bytes that hold nothing, by cause."""
    if not plan.waste:
        return Text("nothing: every byte can hold something")
    rows = [
        (
            found.tier,
            found.cause,
            show_bytes(found.num_bytes),
            words.share(found.num_bytes, words.budget_bytes(plan, found.tier)),
            found.why,
        )
        for found in plan.waste
    ]
    return sheets.sheet(_WASTE, rows, width)


def what_if_table(what_ifs: Sequence[WhatIf], width: int) -> RenderableType:
    """Return the plan as asked for, and one row for every change; refusals stand below."""
    before = what_ifs[0].before
    made = [change for change in what_ifs if not change.after.refusal]
    outcomes = [before, *(change.after for change in made)]
    said = [_outcome(outcome, before) for outcome in outcomes]
    names = [*_OUTCOMES, *(tier for tier in _TIERS if any(row[tier] != "0" for row in said))]
    if len({row["a slot"] for row in said}) > 1 or len(names) > len(_OUTCOMES):
        names.append("a slot")
    changes = ["as asked for", *(words.change(change.change) for change in made)]
    columns = [Column(name="change", is_number=False), *(Column(name=name) for name in names)]
    rows = [
        (change, *(row[name] for name in names)) for change, row in zip(changes, said, strict=True)
    ]
    refused = [
        Text(f"{words.change(change.change)}: {change.after.refusal}", style="red")
        for change in what_ifs
        if change.after.refusal
    ]
    return Group(sheets.sheet(columns, rows, width, bold=0), *refused)


def _group_row(group: GroupPlan) -> tuple[str, ...]:
    return (
        words.keeps(group),
        f"{len(group.layer_names):,}",
        f"{group.tokens_per_block:,}",
        show_bytes(group.bytes_per_page),
        words.plural(group.blocks_per_longest_request, "block"),
        f"{group.kernel_blocks_per_block:,} of {words.plural(group.kernel_tokens_per_block, 'token')}",
        words.plural(group.table_blocks, "entry"),
    )


def _outcome(outcome: PlanOutcome, before: PlanOutcome) -> dict[str, str]:
    return {
        "blocks": f"{outcome.num_blocks:,}",
        "a block": show_bytes(outcome.bytes_per_block),
        "at once": words.times(outcome.concurrency, before.concurrency),
        "capacity": f"{outcome.capacity_tokens:,}",
        "longest": f"{outcome.largest_request_tokens:,}",
        "host slots": f"{outcome.num_slots:,}",
        "disk slots": f"{outcome.num_disk_slots:,}",
        "remote slots": f"{outcome.num_remote_slots:,}",
        "a slot": show_bytes(outcome.bytes_per_slot),
    }


def _beside(said: Text, value: str, width: int, *, style: str = "") -> list[RenderableType]:
    """Return a text with a value at the right end of its line, or of the next line if both do not fit."""
    if not value:
        return [_indented(said)]
    if len(said.plain) + 2 + len(value) <= width:
        said.append(" " * (width - len(said.plain) - len(value)), style="not bold")
        said.append(value, style=style or "not bold")
        return [said]
    return [_indented(said), Text(value, style=style, justify="right")]


def _indented(said: Text) -> RenderableType:
    """Return a text whose further lines are indented like its first line."""
    indent = len(said.plain) - len(said.plain.lstrip())
    return Padding(said[indent:], (0, 0, 0, indent))


def _titled(title: str, part: RenderableType) -> RenderableType:
    return Group(Text(title, style="bold underline"), part, Text(""))
