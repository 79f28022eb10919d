"""Own how many places the row of a request may have in the block table, and how many tokens such a row covers.

places(tokens) = sum over groups of the entries that a request of so many tokens has in its row
covered        = places(max(tokens, encoder tokens)) <= PLACES_MAX

A window or a recurrent state takes few blocks however long the request is, but a place for every block of its tokens.
So where no layer keeps every token, blocks bound no request, and this does.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvlease.errors import InvalidError
from kvlease.geometry import floor_div
from kvlease.spec import LayerSpec
from kvlease.units import TOKENS_MAX
from kvleased.counted import counted
from kvleased.planning.capacity import group_table_blocks
from kvleased.planning.demand import Demand

PLACES_MAX: Final = 2**22
"""Places of a request's row in the block table, over all groups: the control process keeps 16 bytes for each."""

SpecsByGroup = Sequence[Sequence[LayerSpec]]
"""The different specs of each group's layers."""


def row_places(specs_by_group: SpecsByGroup, demand: Demand) -> int:
    """Return the places of a request's row, over all groups."""
    return sum(group_table_blocks(specs, demand) for specs in specs_by_group)


def covered_tokens(specs_by_group: SpecsByGroup, demand: Demand, most: int) -> int:
    """Return the tokens of the longest request whose row is short enough, up to `most`; 0 if there is none.

    A longer request never has fewer places, so halving finds the longest.
    """

    def is_covered(num_tokens: int) -> bool:
        return row_places(specs_by_group, replace(demand, num_tokens=num_tokens)) <= PLACES_MAX

    if is_covered(most):
        return most
    covered, too_many = 0, most
    while too_many - covered > 1:
        tokens = floor_div(covered + too_many, 2)
        if is_covered(tokens):
            covered = tokens
        else:
            too_many = tokens
    return covered


def row_too_long(specs_by_group: SpecsByGroup, demand: Demand) -> InvalidError:
    """Return the refusal of a request, or of an encoder's input, whose row is too long; `limit` is the longest."""
    alone = replace(demand, encoder_tokens=0)
    limit = covered_tokens(specs_by_group, alone, TOKENS_MAX)
    name, what, tokens = "longest_request_tokens", "a request", demand.num_tokens
    if demand.encoder_tokens > limit:
        name, what, tokens = "encoder_tokens_max", "an encoder's input", demand.encoder_tokens
    places = row_places(specs_by_group, replace(alone, num_tokens=tokens))
    message = (
        f"{what} of {counted(tokens, 'token')} takes {counted(places, 'place')} of a row of the block table, over all "
        f"groups; there may be {PLACES_MAX}, enough for {counted(limit, 'token')}; lower {name}, or raise "
        "tokens_per_block"
    )
    return InvalidError(message, resource=name, rule="row_too_long", need=tokens, limit=limit)
