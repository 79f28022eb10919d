"""Laws of pipeline stages: each layer is in one stage, in order, and stages differ by at most one layer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.spec import FullAttention, LayerSpec
from kvleased.planning.models import pipeline_stages
from tests.unit.service.planning.models.configs import config_text, layers


def named(*names: str) -> tuple[LayerSpec, ...]:
    """Return layers with these names."""
    return tuple(
        FullAttention(name=name, num_kv_heads=1, head_size=64, dtype="bfloat16") for name in names
    )


@given(st.integers(1, 64), st.integers(1, 16))
def test_stages_are_even_and_in_order(num_layers: int, ranks: int) -> None:
    """Stages keep all layers once, in order, and differ by at most one layer."""
    model = named(*(f"layers.{index}.attn" for index in range(num_layers)))
    ranks = min(ranks, num_layers)

    stages = pipeline_stages(model, ranks)

    sizes = [len(stage) for stage in stages]
    assert [layer.name for stage in stages for layer in stage] == [item.name for item in model]
    assert len(stages) == ranks
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("num_layers", "ranks", "sizes"),
    [
        pytest.param(32, 4, [8, 8, 8, 8], id="even"),
        pytest.param(33, 4, [8, 8, 9, 8], id="one left"),
        pytest.param(35, 4, [9, 9, 9, 8], id="three left"),
        pytest.param(61, 2, [31, 30], id="deepseek on two"),
        pytest.param(5, 1, [5], id="one stage"),
    ],
)
def test_layers_left_over_go_before_the_last_stage(
    num_layers: int, ranks: int, sizes: list[int]
) -> None:
    """Layers left over go to stages before the last, which also has the model's head."""
    model = named(*(f"layers.{index}" for index in range(num_layers)))

    assert [len(stage) for stage in pipeline_stages(model, ranks)] == sizes


def test_all_that_one_layer_keeps_stays_together() -> None:
    """The indexer, window and states of one DeepSeek V4 layer are on one stage."""
    stages = pipeline_stages(layers(config_text("deepseek-v4-flash")), 3)

    places = [{layer.name.split(".")[2] for layer in stage} for stage in stages]
    assert not places[0] & places[1]
    assert not places[1] & places[2]
    assert [len(place) for place in places] == [14, 15, 14]


def test_layers_that_keep_nothing_count() -> None:
    """Layers that keep nothing count, such as the feed-forward layers at the end of Nemotron-H."""
    model = named("layers.0", "layers.2")

    assert [len(stage) for stage in pipeline_stages(model, 2, num_layers=6)] == [2, 0]
    assert [len(stage) for stage in pipeline_stages(model, 2)] == [1, 1]


def test_names_without_numbers_are_layers_of_their_own() -> None:
    """Layers given by hand under any name are shared in their order."""
    stages = pipeline_stages(named("first", "second.0", "third"), 3)

    assert [[layer.name for layer in stage] for stage in stages] == [
        ["first"],
        ["second.0"],
        ["third"],
    ]


@pytest.mark.parametrize("ranks", [0, 3])
def test_stages_without_a_layer_are_refused(ranks: int) -> None:
    """There must be at least one stage, and no more stages than layers."""
    with pytest.raises(InvalidError, match="from 1 to 2") as refusal:
        pipeline_stages(named("layers.0", "layers.1"), ranks)

    assert refusal.value.rule == "more_stages_than_layers"
