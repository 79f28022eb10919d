"""Laws of what a plan's groups keep, as client and daemon read it from the plan."""

from dataclasses import replace
from typing import Any

import pytest

from kvlease.groups import Keeps
from kvlease.plan import EngineInputs, PlanInputs
from kvlease.plan_groups import groups_of, why_no_prefix
from kvlease.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    LayerSpec,
    RingState,
    SlidingWindow,
    StateSpace,
)
from kvleased.planning import plan

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 4, "dtype": "float32"}
FULL = FullAttention(name="full", **HEADS)
WINDOW = SlidingWindow(name="window", window_tokens=40, retained_tokens=3, **HEADS)
CHUNK = ChunkedLocal(name="chunk", chunk_tokens=64, **HEADS)
CROSS = CrossAttention(name="cross", **HEADS)
STATE = StateSpace(name="state", shapes=((128,),), dtypes=("float32",), num_speculative_blocks=1)


def planned(*layers: LayerSpec, state_mode: str = "none", prefix_caching: bool = True) -> Any:
    """Return the plan of a cache with these layers."""
    engine = EngineInputs(
        tokens_per_step=32,
        state_mode=state_mode,
        encoder_tokens_max=32,
        prefix_caching=prefix_caching,
    )
    return plan(
        PlanInputs(
            layers=layers,
            tokens_per_block=16,
            device_blocks=256,
            null_blocks=1,
            longest_request_tokens=512,
            engine=engine,
        )
    )


@pytest.mark.parametrize(
    ("layers", "state_mode", "keeps", "kept_tokens"),
    [
        pytest.param((FULL,), "none", Keeps.EVERYTHING, 0, id="full"),
        pytest.param((WINDOW,), "none", Keeps.WINDOW, 42, id="window"),
        pytest.param((CHUNK,), "none", Keeps.CHUNK, 64, id="chunk"),
        pytest.param((CROSS,), "none", Keeps.FIXED, 0, id="cross"),
        pytest.param((STATE,), "none", Keeps.FIXED, 0, id="current state"),
        pytest.param((STATE,), "align", Keeps.STATE, 0, id="aligned states"),
        pytest.param((STATE,), "all", Keeps.EVERYTHING, 0, id="all states"),
    ],
)
def test_group_keeps_what_its_layers_need(
    layers: tuple[LayerSpec, ...], state_mode: str, keeps: Keeps, kept_tokens: int
) -> None:
    """The plan alone determines what a group keeps."""
    (group,) = groups_of(planned(*layers, state_mode=state_mode))

    assert (group.keeps, group.kept_tokens) == (keeps, kept_tokens)
    assert group.gives_back is (keeps in (Keeps.WINDOW, Keeps.CHUNK, Keeps.STATE))


@pytest.mark.parametrize(
    ("layers", "engine", "why"),
    [
        pytest.param((FULL, WINDOW, CHUNK), {}, "", id="attention"),
        pytest.param((FULL, STATE), {"state_mode": "align"}, "", id="aligned states"),
        pytest.param(
            (FULL, CROSS),
            {},
            "group 1 (layers of kind cross_attention) depends on an encoder's output, which no key covers",
            id="encoder",
        ),
        pytest.param(
            (FULL, STATE),
            {},
            "group 1 (layers of kind state_space) keeps no state that another request could go on from",
            id="newest state only",
        ),
        pytest.param(
            (replace(FULL, tokens_per_block=32), replace(WINDOW, num_kv_heads=2)),
            {"prefix_caching": False},
            "the blocks of group 1 (layers of kind sliding_window) do not end where keys do",
            id="blocks shorter than keys",
        ),
        pytest.param(
            (RingState(name="ring", **HEADS),), {}, "no group's blocks have keys", id="no keys"
        ),
    ],
)
def test_why_no_prefix_is_found_is_told(
    layers: tuple[LayerSpec, ...], engine: dict[str, Any], why: str
) -> None:
    """The first group because of which no prefix is found is named; nothing if prefixes are found."""
    assert why_no_prefix(planned(*layers, **engine)) == why
