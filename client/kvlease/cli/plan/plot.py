"""Own the drawing of concurrency against request length; the only place of the client that needs matplotlib."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvlease.cli.plan.planner import Planner
from kvlease.cli.plan.words import change as change_words
from kvlease.errors import InvalidError
from kvlease.plan import PlanInputs

_POINTS: Final = 48
_DOTS_PER_INCH: Final = 150
_NARROW: Final = 8
"""If the largest number is less than this many times the smallest, the axis is too short for powers of two."""
_WHOLE: Final = 100
"""From this number on, people need no decimals."""
_DASH: Final = 4.0

Dashes: TypeAlias = str | tuple[float, tuple[float, ...]]
"""How a line is dashed, as matplotlib takes it: where the pattern starts, and its dashes and gaps."""

_DASHES: Final[tuple[Dashes, ...]] = (
    "solid",
    (0, (6, 3)),
    (0, (2, 2)),
    (0, (6, 2, 1, 2)),
)

Points: TypeAlias = tuple[list[int], list[float]]
"""Request lengths, and how many of each fit at once."""


def draw(planner: Planner, inputs: PlanInputs, changes: Sequence[str], path: Path) -> None:
    """Draw how many requests of each length fit at once, as asked for and with every change.

    Raises:
        InvalidError: the file cannot be written.
    """
    curves = {"as asked for": points(planner, inputs)}
    for change in changes:
        curves[change_words(change)] = points(planner, planner.changed(inputs, change))
    try:
        drawn(curves).savefig(path, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise InvalidError(f"cannot write {path}: {error}", resource="plot") from error


def drawn(curves: Mapping[str, Points]) -> Figure:
    """Return the drawing of some curves, in which curves that lie over each other can all be seen."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for curve in families(curves):
        lengths, concurrency = curves[curve.name]
        axes.plot(
            lengths,
            concurrency,
            label=curve.label,
            linewidth=curve.width,
            linestyle=curve.dashes,
            marker="o" if len(lengths) == 1 else "",
        )
    axes.set(title="How many requests fit", xlabel="tokens of a request", ylabel="at once")
    _scale(axes, "x", [length for lengths, _ in curves.values() for length in lengths])
    _scale(axes, "y", [number for _, numbers in curves.values() for number in numbers])
    axes.tick_params(axis="x", labelrotation=45)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How one curve is drawn."""

    name: str
    label: str
    width: float
    dashes: Dashes


def families(curves: Mapping[str, Points]) -> Iterator[Curve]:
    """Yield how curves are drawn, so that each can be seen even where others lie over it.

    Those that are exactly the same have thin dashes that take turns, over the wide line of the first.
    """
    alike: list[list[str]] = []
    for name, curve in curves.items():
        family = next((names for names in alike if curves[names[0]] == curve), None)
        if family is None:
            alike.append([name])
        else:
            family.append(name)
    for place, (first, *others) in enumerate(alike):
        yield Curve(
            name=first,
            label=first,
            width=max(3.5, 5.0 - place),
            dashes=_DASHES[place % len(_DASHES)],
        )
        gap = _DASH * (len(others) + 1)
        for turn, name in enumerate(others):
            label = f"{name} (same as {first.removeprefix('as ')})"
            yield Curve(name=name, label=label, width=1.5, dashes=(turn * _DASH, (_DASH, gap)))


def points(planner: Planner, inputs: PlanInputs) -> Points:
    """Return request lengths, from a block up to the longest that fits, and how many of each fit at once."""
    free = replace(inputs, longest_request_tokens=0, fit_longest_request=False)
    fitted = planner.plan_or_explain(free)
    asked = inputs.longest_request_tokens
    longest = max(min(fitted.longest_request_tokens, 2 * asked or fitted.longest_request_tokens), 1)
    least = min(fitted.tokens_per_block, longest)
    steps = [least * (longest / least) ** (step / (_POINTS - 1)) for step in range(_POINTS)]
    lengths = sorted({min(longest, round(step)) for step in steps})
    plans = [
        planner.plan_or_explain(replace(free, longest_request_tokens=tokens)) for tokens in lengths
    ]
    return lengths, [plan.concurrency for plan in plans]


def plain_number(number: float) -> str:
    """Return a number as people write it: never as a power of ten."""
    return f"{number:,.0f}" if number >= _WHOLE or number == int(number) else f"{number:,.3g}"


def _scale(axes: Axes, which: str, numbers: Sequence[float]) -> None:
    """Scale an axis by powers of two, or evenly if there are too few powers of two to read numbers from."""
    axis: Any = getattr(axes, f"{which}axis")
    if max(numbers) < _NARROW * min(numbers):
        axis.set_major_locator(MaxNLocator(nbins=6))
    else:
        getattr(axes, f"set_{which}scale")("log", base=2)
    axis.set_major_formatter(lambda number, _: plain_number(number))
