"""Laws of rows: no request has more places in the block table than a row may have, however few blocks it takes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError, NeverFitsError
from kvlease.plan import CachePlan, EngineInputs, ParallelInputs, PlanInputs
from kvlease.spec import CrossAttention, LayerSpec
from kvlease.units import TOKENS_MAX
from kvleased.planning import plan
from kvleased.planning.demand import Demand
from kvleased.planning.rows import PLACES_MAX, covered_tokens, row_places
from tests.unit.service.planning.specs import chunk, full, states, window

CROSS = CrossAttention(
    name="cross", tokens_per_block=16, num_kv_heads=2, head_size=64, dtype="float16"
)
SHARED = ParallelInputs(tensor_ranks=4, context_ranks=2)
ALIGNED = EngineInputs(state_mode="align")
SPECS = st.lists(
    st.sampled_from([full(), window(), chunk(), CROSS, states(), states(tokens_per_block=48)]),
    min_size=1,
    max_size=5,
)


def inputs_of(*layers: LayerSpec, **changes: Any) -> PlanInputs:
    """Return inputs of a thousand blocks, with the longest request left to the planner."""
    return PlanInputs(layers=layers, tokens_per_block=16, device_blocks=1000, **changes)


def places_of(made: CachePlan) -> int:
    """Return the places of a row, over all groups."""
    return sum(group.table_blocks for group in made.groups)


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        pytest.param((window(),), {}, id="a window"),
        pytest.param((window(), window("other", window_tokens=10)), {}, id="two windows"),
        pytest.param(
            (window(tokens_per_block=32), window("other", tokens_per_block=8, window_tokens=10)),
            {},
            id="windows with other blocks",
        ),
        pytest.param((chunk(),), {}, id="a chunk"),
        pytest.param((states(),), {"engine": ALIGNED}, id="aligned states"),
        pytest.param((states(num_speculative_blocks=3),), {"engine": ALIGNED}, id="speculation"),
        pytest.param((states(), window()), {"engine": ALIGNED}, id="states and a window"),
    ],
)
@pytest.mark.parametrize("may_shorten", [False, True])
def test_longest_request_without_an_end_ends_with_its_row(
    layers: Sequence[LayerSpec], changes: dict[str, Any], may_shorten: bool
) -> None:
    """Where blocks bound no request, the longest has as many places as a row may have, and one token more has not."""
    wanted = inputs_of(*layers, fit_longest_request=may_shorten, **changes)

    made = plan(wanted)

    assert places_of(made) <= PLACES_MAX
    longer = replace(
        wanted, longest_request_tokens=made.longest_request_tokens + 1, fit_longest_request=False
    )
    with pytest.raises(InvalidError) as refusal:
        plan(longer)
    assert (refusal.value.rule, refusal.value.resource) == (
        "row_too_long",
        "longest_request_tokens",
    )
    assert refusal.value.need == made.longest_request_tokens + 1
    assert refusal.value.limit == made.longest_request_tokens


def test_state_that_is_kept_alone_has_no_end() -> None:
    """A row of current states has a place for the state alone, so that the longest request is as long as can be."""
    made = plan(inputs_of(states()))

    assert (made.longest_request_tokens, places_of(made)) == (TOKENS_MAX, 1)


def test_asked_request_whose_row_is_too_long_is_refused_with_the_longest() -> None:
    """The refusal says what was asked for, how many places that takes, how many there may be and what has them."""
    with pytest.raises(InvalidError) as refusal:
        plan(inputs_of(window(), longest_request_tokens=2**30))

    assert (refusal.value.need, refusal.value.limit) == (2**30, 2**26)
    for part in ("1073741824 tokens", "67108864 places", f"may be {PLACES_MAX}", "67108864 tokens"):
        assert part in refusal.value.message
    assert plan(inputs_of(window(), longest_request_tokens=2**26)).longest_request_tokens == 2**26


def test_asked_request_whose_row_is_too_long_is_shortened_if_it_may_be() -> None:
    """A request that may be shortened has as many tokens as its row covers."""
    made = plan(inputs_of(window(), longest_request_tokens=2**30, fit_longest_request=True))

    assert made.longest_request_tokens == 2**26


def test_lack_of_blocks_is_refused_before_lack_of_places() -> None:
    """A request that lacks both is told the longest that has blocks, which has places, too."""
    with pytest.raises(NeverFitsError) as refusal:
        plan(inputs_of(full(), longest_request_tokens=2**30))

    assert (refusal.value.rule, refusal.value.limit) == ("not_enough_memory", 1000 * 16)


def test_lack_of_places_is_told_where_it_ends_first() -> None:
    """A request that lacks both, but places first, is told the longest that has places."""
    with pytest.raises(InvalidError) as refusal:
        plan(replace(inputs_of(full()), device_blocks=2**24, longest_request_tokens=2**30))

    assert (refusal.value.rule, refusal.value.limit) == ("row_too_long", 2**26)


@pytest.mark.parametrize("longest", [0, 1000])
@pytest.mark.parametrize("layer", [window(), replace(CROSS, tokens_per_block=16)])
def test_encoder_input_whose_row_is_too_long_is_refused(layer: LayerSpec, longest: int) -> None:
    """Every row is as long as an encoder's input, so that is refused, whatever requests are asked for."""
    wanted = replace(
        inputs_of(layer),
        device_blocks=2**25,
        longest_request_tokens=longest,
        engine=EngineInputs(encoder_tokens_max=2**28),
    )

    with pytest.raises(InvalidError) as refusal:
        plan(wanted)

    assert (refusal.value.rule, refusal.value.resource) == ("row_too_long", "encoder_tokens_max")
    assert (refusal.value.need, refusal.value.limit) == (2**28, 2**26)


def test_encoder_input_is_refused_for_blocks_first() -> None:
    """An encoder's input for which there are no blocks is refused for those, as ever."""
    wanted = inputs_of(
        CROSS, longest_request_tokens=100, engine=EngineInputs(encoder_tokens_max=2**28)
    )

    with pytest.raises(NeverFitsError) as refusal:
        plan(wanted)

    assert refusal.value.rule == "not_enough_memory"


def test_ranks_that_share_tokens_share_places() -> None:
    """Blocks that context ranks share hold more tokens, so a row of as many places covers as many more."""
    made = plan(replace(inputs_of(full()), device_blocks=2**24, parallel=SHARED))

    assert made.longest_request_tokens == 2 * 2**26


@given(
    SPECS,
    st.integers(1, TOKENS_MAX),
    st.sampled_from(["none", "align", "all"]),
    st.integers(0, 2**27),
)
def test_covered_request_is_the_longest(
    specs: list[LayerSpec], most: int, state_mode: str, encoder_tokens: int
) -> None:
    """The longest covered request has places, and one token more has too many, up to what is asked for."""
    groups = [(spec,) for spec in specs]
    demand = Demand(num_tokens=0, encoder_tokens=encoder_tokens, state_mode=state_mode)

    covered = covered_tokens(groups, demand, most)

    assert 0 <= covered <= most
    if covered:
        assert row_places(groups, replace(demand, num_tokens=covered)) <= PLACES_MAX
    if covered < most:
        assert row_places(groups, replace(demand, num_tokens=covered + 1)) > PLACES_MAX
