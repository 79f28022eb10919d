"""Laws of notes: what people may not expect of a plan is said, and nothing where all is as they expect."""

from dataclasses import replace
from typing import Any

import pytest

from kvlease.plan import EngineInputs, PlanInputs, RankInputs
from kvlease.plan_report import PlanReport
from kvlease.spec import LayerSpec
from kvleased.planning import plan, report
from tests.unit.service.planning.advice.test_what_if import CONFIG
from tests.unit.service.planning.specs import chunk, full, states, window


def notes_of(*layers: Any, **changes: Any) -> tuple[str, ...]:
    """Return the notes of a plan of 64 MiB."""
    fields = {
        "tokens_per_block": 16,
        "device_bytes": 2**26,
        "longest_request_tokens": 100,
    } | changes
    inputs = PlanInputs(layers=layers, **fields)
    return report(inputs, plan(inputs)).notes


COARSE = replace(states("state"), tokens_per_block=1024)
"""A recurrent state, whose blocks are so long that no prefix of 100 tokens ends one."""


def test_ordinary_plan_has_no_notes() -> None:
    """Where nothing is odd, nothing is said."""
    assert notes_of(full("a")) == ()
    assert notes_of(model_config=CONFIG, longest_request_tokens=4096) == ()


def test_prefixes_that_are_never_found_are_told() -> None:
    """Where the longest request is shorter than any prefix that is found, that is said with its numbers."""
    (note,) = notes_of(full("a"), COARSE)

    assert note == (
        "no prefix is ever found, because what is found ends at a multiple of 1024 tokens, and the longest request "
        "has 100; state_mode=align would"
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"engine": EngineInputs(prefix_caching=False)}, id="no prefixes"),
        pytest.param({"longest_request_tokens": 1024}, id="long enough"),
    ],
)
def test_prefixes_that_are_found_are_not_told(changes: dict[str, Any]) -> None:
    """Where prefixes are found, or nobody looks for them, nothing is said."""
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
    """Aligned states are proposed where there is such a plan, and prefixes are found with it."""
    (note,) = notes_of(*layers, **changes)

    assert note.startswith("no prefix is ever found")
    assert note.endswith("the longest request has 100")


def test_rank_without_layers_has_no_notes() -> None:
    """Where nothing is kept, there is no prefix to be found."""
    assert notes_of(full("a"), ranks=(RankInputs(keeps_nothing=True),)) == ()


@pytest.mark.parametrize(("layer", "tokens"), [(window("b"), 128), (chunk("b"), 64)])
def test_windows_kept_whole_are_told(layer: LayerSpec, tokens: int) -> None:
    """In one table with layers that keep all, a window saves nothing, and that is said."""
    (note,) = notes_of(full("a"), layer, engine=EngineInputs(one_group=True))

    assert note.startswith(f"group 0 keeps its windows of {tokens} tokens whole, because")


def test_request_beyond_the_positions_is_told() -> None:
    """A request that is longer than the model was made for is planned, and that is said."""
    notes = notes_of(model_config=CONFIG, longest_request_tokens=5000)

    assert notes == (
        "the longest request has 5000 tokens, more than the 4096 positions of the model",
    )


def test_notes_travel() -> None:
    """Notes are part of the message that programs read."""
    inputs = PlanInputs(
        layers=(full("a"), COARSE),
        tokens_per_block=16,
        device_bytes=2**26,
        longest_request_tokens=9,
    )
    found = report(inputs, plan(inputs))

    assert len(found.notes) == 1
    assert PlanReport.from_proto(found.to_proto()) == found
