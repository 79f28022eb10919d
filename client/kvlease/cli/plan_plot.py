"""Own the drawing of concurrency against request length; the only place of the client that needs matplotlib."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from kvlease.cli.plan_words import change as change_words
from kvlease.cli.planner import Planner
from kvlease.errors import InvalidError
from kvlease.plan import PlanInputs

SUFFIXES: Final = (".png", ".svg")
"""What can be drawn."""
_POINTS: Final = 48
_DOTS_PER_INCH: Final = 150


def draw(planner: Planner, inputs: PlanInputs, changes: Sequence[str], path: Path) -> None:
    """Draw how many requests of each length fit at once, as asked for and with every change.

    Raises:
        InvalidError: the file is of another kind, or cannot be written.
    """
    if path.suffix not in SUFFIXES:
        message = f"--plot is {path.name!r}; it must end in {' or '.join(SUFFIXES)}"
        raise InvalidError(message, resource="plot")
    curves = {"as asked for": inputs} | {
        change: planner.changed(inputs, change) for change in changes
    }
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, asked) in enumerate(curves.items()):
        lengths, concurrency = points(planner, asked)
        # Later lines are thinner, so that those below them can be seen.
        width = max(1.0, 4.0 - index)
        axes.plot(lengths, concurrency, label=change_words(name), linewidth=width)
    axes.set(title="How many requests fit", xlabel="tokens of a request", ylabel="at once")
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log", base=2)
        axis.set_major_formatter(lambda number, _: f"{number:,.5g}")
    axes.tick_params(axis="x", labelrotation=45)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise InvalidError(f"cannot write {path}: {error}", resource="plot") from error


def points(planner: Planner, inputs: PlanInputs) -> tuple[list[int], list[float]]:
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
