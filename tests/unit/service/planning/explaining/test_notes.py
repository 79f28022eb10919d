"""Laws of notes: they tell what people may not expect of a plan; a plan without surprises has none."""

from dataclasses import replace
from typing import Any

import pytest

from kvlease.plan import EngineInputs, PlanInputs, RankInputs
from kvlease.plan_report import PlanReport
from kvlease.spec import CrossAttention, LayerSpec
from kvleased.planning import plan, report
from tests.unit.service.planning.advice.test_what_if import CONFIG
from tests.unit.service.planning.specs import chunk, full, states, window


def notes_of(*layers: Any, **changes: Any) -> tuple[str, ...]:
    """Return the notes of a plan with 64 MiB."""
    fields = {
        "tokens_per_block": 16,
        "device_bytes": 2**26,
        "longest_request_tokens": 100,
    } | changes
    inputs = PlanInputs(layers=layers, **fields)
    return report(inputs, plan(inputs)).notes


COARSE = replace(states("state"), tokens_per_block=1024)
"""A recurrent state with blocks so long that no prefix of 100 tokens ends at one."""


def test_ordinary_plan_has_no_notes() -> None:
    """A plan without surprises has no notes."""
    assert notes_of(full("a")) == ()
    assert notes_of(model_config=CONFIG, longest_request_tokens=4096) == ()


def test_prefixes_that_are_never_found_are_told() -> None:
    """If every findable prefix is longer than the longest request, a note says so with the numbers."""
    (note,) = notes_of(full("a"), COARSE)

    assert note == (
        "no prefix is ever found, because a prefix that is found ends at a multiple of 1024 tokens, and the longest "
        "request has 100; prefixes would be found with state_mode=align"
    )


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        pytest.param(
            COARSE,
            "group 1 (layers of kind state_space) keeps no state that another request could go on from; prefixes would "
            "be found with state_mode=align",
            id="newest state",
        ),
        pytest.param(
            CrossAttention(name="cross", num_kv_heads=2, head_size=64, dtype="float16"),
            "group 1 (layers of kind cross_attention) depends on an encoder's output, which no key covers",
            id="encoder",
        ),
    ],
)
def test_group_that_finds_no_prefixes_is_told(layer: LayerSpec, told: str) -> None:
    """If a group keeps nothing that another request can use, a note says so, and which group it is."""
    engine = EngineInputs(encoder_tokens_max=32)

    changes = {"engine": engine, "longest_request_tokens": 1024}

    assert notes_of(full("a"), layer, **changes) == (f"no prefix is ever found, because {told}",)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"engine": EngineInputs(prefix_caching=False)}, id="no prefixes"),
        pytest.param({"engine": EngineInputs(state_mode="align")}, id="aligned states"),
    ],
)
def test_prefixes_that_are_found_are_not_told(changes: dict[str, Any]) -> None:
    """If prefixes are found, or prefix caching is off, there is no note about them."""
    assert notes_of(full("a"), COARSE, **changes) == ()


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        pytest.param((full("a", tokens_per_block=1024),), {}, id="no states"),
        pytest.param(
            (full("a", tokens_per_block=1024), COARSE),
            {"engine": EngineInputs(state_mode="align")},
            id="aligned already",
        ),
        pytest.param(
            (full("a"), COARSE),
            {"device_bytes": 0, "device_blocks": 8},
            id="no room for more states",
        ),
    ],
)
def test_only_a_mode_that_helps_is_named(layers: tuple[Any, ...], changes: dict[str, Any]) -> None:
    """A note proposes aligned states only if that can be planned and prefixes are then found."""
    (note,) = notes_of(*layers, **changes)

    assert note.startswith("no prefix is ever found")
    assert note.endswith("the longest request has 100")


def test_rank_without_layers_has_no_notes() -> None:
    """A rank that keeps nothing has no note about prefixes."""
    assert notes_of(full("a"), ranks=(RankInputs(keeps_nothing=True),)) == ()


@pytest.mark.parametrize(("layer", "tokens"), [(window("b"), 128), (chunk("b"), 64)])
def test_windows_kept_whole_are_told(layer: LayerSpec, tokens: int) -> None:
    """If windows share a table with layers that keep all tokens, a note says that the windows save nothing."""
    (note,) = notes_of(full("a"), layer, engine=EngineInputs(one_group=True))

    assert note.startswith(
        f"group 0 keeps every token, although some of its layers need only windows of {tokens} tokens, because"
    )


def test_request_beyond_the_positions_is_told() -> None:
    """If the longest request is longer than the model's positions, a note says so."""
    notes = notes_of(model_config=CONFIG, longest_request_tokens=5000)

    assert notes == (
        "the longest request has 5000 tokens, more than the 4096 positions of the model",
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"longest_request_tokens": 0}, id="automatic"),
        pytest.param({"longest_request_tokens": 2**30, "fit_longest_request": True}, id="fitted"),
    ],
)
def test_request_that_ends_with_its_row_is_told(changes: dict[str, Any]) -> None:
    """If the longest request is shortened to what a row has places for, a note says so, and what makes it longer."""
    (note,) = notes_of(window("a"), **changes)

    assert note == (
        "the longest request has 67108864 tokens, because its row of the block table has at most 4194304 places over "
        "all groups; a larger tokens_per_block makes it longer, and longest_request_tokens shorter"
    )


@pytest.mark.parametrize(
    ("layer", "longest"),
    [
        pytest.param(window("a"), 2**26, id="as asked"),
        pytest.param(full("a"), 0, id="as fits the blocks"),
    ],
)
def test_request_that_ends_for_other_reasons_is_not_told(layer: LayerSpec, longest: int) -> None:
    """A request as long as asked for, or as blocks allow, has no note about its row."""
    assert notes_of(layer, longest_request_tokens=longest) == ()


def test_notes_travel() -> None:
    """The plan's message carries its notes."""
    inputs = PlanInputs(
        layers=(full("a"), COARSE),
        tokens_per_block=16,
        device_bytes=2**26,
        longest_request_tokens=9,
    )
    found = report(inputs, plan(inputs))

    assert len(found.notes) == 1
    assert PlanReport.from_proto(found.to_proto()) == found
