"""Laws of match units: at which tokens prefixes get names and can end."""

from typing import Any

import pytest

from kvlease.errors import InvalidError
from kvlease.plan import EngineInputs
from kvlease.spec import LayerSpec
from kvleased.planning.groups.grouping import Group
from kvleased.planning.match_units import match_units
from tests.unit.service.planning.specs import full, latent, latent_window, states, window

COARSE = full(tokens_per_block=256)
STATES = states(tokens_per_block=256)
FINE = {"state_mode": "align", "match_tokens": 16}


def units(*specs: LayerSpec, ranks: int = 1, **engine: Any) -> tuple[int, int, int]:
    """Return the tokens of a scheduler's block, of a key, and between the ends of hits."""
    groups = [Group(layers=(spec,)) for spec in specs]
    found = match_units(groups, EngineInputs(**engine), ranks)
    return found.scheduler_block_tokens, found.hash_block_tokens, found.hit_alignment_tokens


@pytest.mark.parametrize(
    ("specs", "engine", "found"),
    [
        pytest.param((), {}, (1, 1, 1), id="no-groups"),
        pytest.param((full(),), {}, (16, 16, 16), id="one-group"),
        pytest.param((full(),), {"match_tokens": 16}, (16, 16, 16), id="one-group-by-its-block"),
        pytest.param(
            (full(),), {"match_tokens": 8, "prefix_caching": False}, (16, 16, 16), id="not-matched"
        ),
        pytest.param((full(),), {"ranks": 4}, (64, 64, 64), id="sharded-over-ranks"),
        pytest.param(
            (full(), window(tokens_per_block=24)), {}, (48, 8, 48), id="keys-by-common-divisor"
        ),
        pytest.param(
            (full(), window(tokens_per_block=64)), {"match_tokens": 8}, (64, 8, 64), id="finer-keys"
        ),
        pytest.param(
            (full(), latent_window(tokens_per_block=4, is_replayed=True)),
            {},
            (16, 16, 16),
            id="uncacheable-groups-set-no-keys",
        ),
        pytest.param(
            (latent_window(tokens_per_block=8, is_replayed=True),
             latent_window(tokens_per_block=4, is_replayed=True)),
            {},
            (8, 4, 8),
            id="unless-there-are-no-others",
        ),
        pytest.param((full(), STATES), {}, (256, 256, 256), id="states-that-end-with-requests"),
        pytest.param(
            (full(), STATES), {"state_mode": "align"}, (256, 16, 16), id="states-inside-blocks"
        ),
        pytest.param((COARSE, STATES), FINE, (256, 16, 16), id="fine-hits"),
        pytest.param(
            (COARSE, STATES), {"state_mode": "align"}, (256, 256, 256), id="no-finer-than-blocks"
        ),
        pytest.param(
            (COARSE, STATES),
            {"state_mode": "align", "ranks": 2, "match_tokens": 256},
            (512, 256, 256),
            id="with-ranks-a-block-of-a-key",
        ),
        pytest.param(
            (COARSE, STATES, window(tokens_per_block=256)),
            FINE,
            (256, 16, 256),
            id="a-window-only-reaches-block-ends",
        ),
        pytest.param(
            (COARSE, STATES, window()), FINE, (256, 16, 16), id="unless-its-blocks-are-keys"
        ),
        pytest.param(
            (COARSE, STATES),
            {**FINE, "prefix_caching": False},
            (256, 256, 256),
            id="nobody-looks",
        ),
        pytest.param(
            (COARSE, STATES),
            {**FINE, "prefix_caching": False, "has_connector": True},
            (256, 16, 256),
            id="only-a-connector-looks",
        ),
    ],
)  # fmt: skip
def test_units_follow_from_blocks(
    specs: tuple[LayerSpec, ...], engine: dict[str, Any], found: tuple[int, int, int]
) -> None:
    """Keys are as fine as all cacheable groups allow; hits end where every group can serve them."""
    assert units(*specs, **engine) == found


@pytest.mark.parametrize(
    ("specs", "limit"),
    [
        pytest.param((full(),), 16, id="one-group"),
        pytest.param((full(), window(tokens_per_block=64)), 16, id="several-groups"),
    ],
)
def test_match_tokens_that_do_not_divide_are_refused(
    specs: tuple[LayerSpec, ...], limit: int
) -> None:
    """The refusal names the number and what it should divide."""
    with pytest.raises(InvalidError) as refusal:
        units(*specs, match_tokens=24)

    error = refusal.value
    assert (error.rule, error.need, error.limit) == ("invalid_prefix_match_unit", 24, limit)


def test_prefix_that_ends_inside_a_state_is_refused() -> None:
    """A prefix may not end inside a compressed state, which would cover tokens behind that end."""
    compressed = latent(tokens_per_block=256, tokens_per_state=128)

    with pytest.raises(InvalidError) as refusal:
        units(compressed, STATES, state_mode="align", match_tokens=64)

    error = refusal.value
    assert (error.rule, error.need, error.available) == ("invalid_prefix_match_unit", 128, 64)
