"""Laws of what a plan's groups keep, as client and daemon read it from the plan."""

from typing import Any

import pytest

from kvlease.groups import Keeps
from kvlease.plan import EngineInputs, PlanInputs
from kvlease.plan_groups import groups_of
from kvlease.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    LayerSpec,
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


def planned(*layers: LayerSpec, state_mode: str = "none") -> Any:
    """Return the plan of a cache with these layers."""
    engine = EngineInputs(tokens_per_step=32, state_mode=state_mode, encoder_tokens_max=32)
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
