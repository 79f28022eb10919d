"""Laws of the order in which pages lie."""

import pytest

from kvlease.errors import InvalidError
from kvlease.layout import ALIASES, LAYOUT_DEFAULT, Layout, parse_layout


@pytest.mark.parametrize("layout", Layout)
def test_every_layout_has_all_axes(layout: Layout) -> None:
    """A layout names every axis once, keeps a state's bytes together, and has layers or blocks outermost."""
    assert sorted(layout) == sorted("LBHNC")
    assert layout.endswith("C")
    assert layout.is_layer_outermost != layout.is_block_outermost


def test_pages_lie_together_where_layer_and_block_are_outside() -> None:
    """A page is one piece unless heads lie outside blocks or layers."""
    assert {layout for layout in Layout if not layout.is_block_compact} == {"LHBNC", "BHLNC"}


@pytest.mark.parametrize(
    ("name", "layout"),
    [("", LAYOUT_DEFAULT), ("LBHNC", Layout.LBHNC), *ALIASES.items()],
)
def test_layouts_are_found_by_name(name: str, layout: Layout) -> None:
    """A layout is named by its axes, or by the word that engines use."""
    assert parse_layout(name) is layout


def test_unknown_layout_is_refused_with_the_known_ones() -> None:
    """An unknown name is refused, and the refusal lists the known layouts."""
    with pytest.raises(InvalidError, match="BLHNC") as refusal:
        parse_layout("CBA")

    assert refusal.value.rule == "unknown_layout"
