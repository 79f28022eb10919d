"""Own the orders in which pages can lie in memory; the planner chooses the one that a cache has.

The axes are L (layer), B (block), H (head), N (state) and C (the bytes of one state), outermost first.
"""

from enum import StrEnum
from typing import Final

from kvlease.errors import InvalidError


class Layout(StrEnum):
    """An order of the axes, outermost first."""

    LBHNC = "LBHNC"
    LBNHC = "LBNHC"
    LHBNC = "LHBNC"
    BLHNC = "BLHNC"
    BLNHC = "BLNHC"
    BHLNC = "BHLNC"

    @property
    def is_block_outermost(self) -> bool:
        """Whether all bytes of a block lie together."""
        return self.value.startswith("B")

    @property
    def is_layer_outermost(self) -> bool:
        """Whether all bytes of a layer lie together."""
        return self.value.startswith("L")

    @property
    def is_block_compact(self) -> bool:
        """Whether layer and block are the two outermost axes, so that every page is contiguous."""
        return set(self.value[:2]) == {"L", "B"}


ALIASES: Final = {"NHD": Layout.LBNHC, "HND": Layout.LBHNC}
"""The names that engines use for two of the orders."""

LAYOUT_DEFAULT: Final = Layout.BLHNC
"""Blocks outermost: a block is one piece, so it moves in one copy."""


def parse_layout(name: str) -> Layout:
    """Return the layout with a name or alias; the empty name gives the default.

    Raises:
        InvalidError: there is no such layout.
    """
    if not name:
        return LAYOUT_DEFAULT
    if name in ALIASES:
        return ALIASES[name]
    if name not in Layout.__members__:
        message = f"layout {name[:40]!r} is not one of {', '.join((*Layout, *ALIASES))}"
        raise InvalidError(message, resource="layout", rule="unknown_layout")
    return Layout(name)
