"""Laws of the plot of `kvlease plan`: every curve is visible, and every axis has readable numbers."""

import json
from pathlib import Path

import pytest

from kvlease.cli.plan.plot import Curve, drawn, families, plain_number
from tests.unit.client.cli.plan.test_command import CONFIG, run

LINE = ([16, 64, 512], [640.0, 500.0, 330.0])
OTHER = ([16, 64, 512], [1e6, 1e5, 1e3])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the directory of a model with a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plot_is_drawn(model: Path, suffix: str) -> None:
    """The plot shows concurrency against request length, with a line for each change that can be planned."""
    path = model / f"drawn.{suffix}"
    status, _, errors = run(
        "--model", model, "--device-memory", "8GiB", "--plot", path,
        "--what-if", "kv_dtype=fp8", "--what-if", "device_bytes=1KiB",
    )  # fmt: skip

    assert (status, errors) == (0, "")
    assert path.stat().st_size > 1000


def test_equal_curves_take_turns() -> None:
    """Of curves that are exactly equal, each but the first says so, and is drawn where the others have gaps."""
    first, *others, apart = families({"as asked for": LINE, "a": LINE, "b": LINE, "c": OTHER})

    assert first == Curve(name="as asked for", label="as asked for", width=5.0, dashes="solid")
    assert [curve.label for curve in others] == ["a (same as asked for)", "b (same as asked for)"]
    assert len({curve.dashes for curve in (first, *others, apart)}) == 4
    assert all(curve.width < first.width for curve in others)


@pytest.mark.parametrize("curve", [LINE, OTHER], ids=["narrow", "wide"])
def test_axes_have_plain_numbers(curve: tuple[list[int], list[float]]) -> None:
    """An axis has at least three numbers, and none is written as a power of ten."""
    axes = drawn({"a": curve}).axes[0]
    for axis, (least, most) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        ticks = [tick for tick in axis.get_majorticklocs() if least <= tick <= most]
        labels = axis.get_major_formatter().format_ticks(ticks)

        assert len(ticks) >= 3
        assert not any("e" in label for label in labels)


@pytest.mark.parametrize(
    ("number", "said"),
    [(131070.0, "131,070"), (0.125, "0.125"), (12.5, "12.5"), (2.0, "2"), (1234.5, "1,234")],
)
def test_number_is_plain(number: float, said: str) -> None:
    """A number is written with as many digits as people can use."""
    assert plain_number(number) == said
