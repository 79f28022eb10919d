"""Own the drawing of hit ratio against blocks; only drawing needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from kvlease.cli.plan.plot import families, plain_number
from kvlease.errors import InvalidError
from kvlease.traces import Simulated

_DOTS_PER_INCH: Final = 150
_BOUND: Final = "belady (bound)"

Points = tuple[list[int], list[float]]
"""Sizes, and the hit ratio at each in percent."""


def draw(results: Sequence[Simulated], path: Path) -> None:
    """Draw the hit ratio of each policy against the blocks of the pool, below the bound.

    Raises:
        InvalidError: the file cannot be written.
    """
    try:
        drawn(curves_of(results)).savefig(path, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise InvalidError(f"cannot write {path}: {error}", resource="plot") from error


def curves_of(results: Sequence[Simulated]) -> dict[str, Points]:
    """Return the points of each policy, by size, and then those of the bound."""
    curves: dict[str, Points] = {}
    bounds: dict[int, float] = {}
    for result in sorted(results, key=lambda one: one.num_blocks):
        bounds[result.num_blocks] = 100 * result.bound_hit_ratio
        if result.policy != _BOUND.partition(" ")[0]:
            sizes, ratios = curves.setdefault(result.policy, ([], []))
            sizes.append(result.num_blocks)
            ratios.append(100 * result.hit_ratio)
    return {**curves, _BOUND: (list(bounds), list(bounds.values()))}


def drawn(curves: dict[str, Points]) -> Figure:
    """Return the drawing of some curves."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for curve in families(curves):
        sizes, ratios = curves[curve.name]
        axes.plot(
            sizes,
            ratios,
            label=curve.label,
            linewidth=curve.width / 2,
            linestyle=curve.dashes,
            marker="o",
            markersize=4,
            color="black" if curve.name == _BOUND else None,
        )
    axes.set(title="Keys found", xlabel="blocks of the pool", ylabel="percent of the keys")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    horizontal: Any = axes.xaxis
    horizontal.set_major_formatter(lambda number, _: plain_number(number))
    horizontal.set_minor_formatter(lambda *_: "")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    return figure
