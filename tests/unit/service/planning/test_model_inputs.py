"""Laws of inputs that name a model: open fields are the model's, and stages share its layers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlease.errors import InvalidError
from kvlease.plan import EngineInputs, ParallelInputs, PlanInputs
from kvlease.spec import CrossAttention, FullAttention
from kvleased.planning import plan
from kvleased.planning.model_inputs import with_model_facts

CONFIGS = Path(__file__).parents[3] / "fixtures" / "configs"
NEMOTRON = json.loads((CONFIGS / "nemotron-h-8b.json").read_text(encoding="utf-8"))
T5 = json.loads((CONFIGS / "flan-t5-xl.json").read_text(encoding="utf-8"))
LLAMA = (CONFIGS / "llama3-8b.json").read_text(encoding="utf-8")
WHISPER = (CONFIGS / "whisper-large-v3.json").read_text(encoding="utf-8")
LAYERS = tuple(
    FullAttention(name=f"layers.{index}", num_kv_heads=2, head_size=32, dtype="float16")
    for index in range(5)
)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param({}, "both missing; give one", id="neither"),
        pytest.param({"layers": LAYERS, "model_config": LLAMA}, "both given; give one", id="both"),
    ],
)
def test_layers_have_one_source(given: dict[str, Any], says: str) -> None:
    """Inputs with layers and a model, or with neither, are refused by what they have."""
    with pytest.raises(
        InvalidError, match=f"layers and model_config are {says} of them"
    ) as refusal:
        plan(PlanInputs(tokens_per_block=16, device_blocks=10, **given))

    assert refusal.value.resource == "layers"


def test_open_longest_request_is_the_models() -> None:
    """However much memory there is, an open longest request is no longer than the model takes."""
    inputs = PlanInputs(model_config=LLAMA, tokens_per_block=16, device_bytes=1 << 42)

    assert plan(inputs).longest_request_tokens == json.loads(LLAMA)["max_position_embeddings"]


def test_open_longest_request_is_what_fits() -> None:
    """If memory holds less than the model's longest request, an open request is shortened and not refused."""
    inputs = PlanInputs(model_config=LLAMA, tokens_per_block=16, device_blocks=10)

    assert plan(inputs).longest_request_tokens == 160


def test_what_is_said_stands() -> None:
    """A longest request and an encoder's input that are given stay as they are."""
    given = PlanInputs(
        model_config=WHISPER,
        tokens_per_block=16,
        device_blocks=1000,
        longest_request_tokens=100,
        engine=EngineInputs(encoder_tokens_max=7),
    )

    assert with_model_facts(given) == given


def test_open_encoder_input_is_the_models() -> None:
    """An open encoder input is the longest that the encoder takes."""
    inputs = PlanInputs(model_config=WHISPER, tokens_per_block=16, device_blocks=1000)

    assert with_model_facts(inputs).engine.encoder_tokens_max == 1500


@pytest.mark.parametrize("source", [{"model_config": LLAMA}, {"layers": LAYERS}])
def test_pipeline_stages_share_the_layers(source: dict[str, object]) -> None:
    """Each layer is kept by the tensor ranks of exactly one stage, and all ranks have equally many blocks."""
    inputs = PlanInputs(
        **source,  # type: ignore[arg-type]  # of two types
        tokens_per_block=16,
        device_bytes=1 << 30,
        parallel=ParallelInputs(tensor_ranks=2, pipeline_ranks=2),
    )

    made = plan(inputs)

    names = [[layer.name for layer in rank.layers] for rank in made.ranks]
    assert len(names) == 4
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert not set(names[0]) & set(names[2])
    assert list(made.groups[0].layer_names) == names[0] + names[2]


def test_more_stages_than_layers_are_refused() -> None:
    """A stage without a layer is refused with the most stages that there may be."""
    inputs = PlanInputs(
        layers=LAYERS,
        tokens_per_block=16,
        device_bytes=1 << 20,
        parallel=ParallelInputs(pipeline_ranks=6),
    )

    with pytest.raises(InvalidError) as refusal:
        plan(inputs)

    assert (refusal.value.need, refusal.value.limit) == (6, 5)


def test_cross_attention_over_nothing_is_refused() -> None:
    """Without the encoder's longest input, cross attention would take no block, so it is refused."""
    config = json.dumps(T5 | {"n_positions": None})
    inputs = PlanInputs(model_config=config, tokens_per_block=16, device_bytes=1 << 30)

    with pytest.raises(InvalidError, match=r"set engine\.encoder_tokens_max") as refusal:
        plan(inputs)

    assert (refusal.value.rule, refusal.value.resource) == (
        "missing_encoder_tokens",
        "encoder_tokens_max",
    )
    given = plan(replace(inputs, engine=EngineInputs(encoder_tokens_max=100)))
    assert given.groups[1].blocks_per_longest_request == 7


def test_cross_attention_by_hand_may_have_no_input() -> None:
    """With layers given by hand, 0 means that no encoder's input is kept."""
    cross = CrossAttention(name="c", num_kv_heads=2, head_size=32, dtype="bfloat16")
    inputs = PlanInputs(layers=(cross,), tokens_per_block=16, device_bytes=1 << 20)

    assert plan(inputs).groups[0].blocks_per_longest_request == 0


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        pytest.param({"hybrid_override_pattern": None}, "missing_field", id="no pattern"),
        pytest.param({"hybrid_override_pattern": "-" * 52}, "keeps_nothing", id="nothing kept"),
    ],
)
def test_config_that_gives_no_layer_is_refused(changes: dict[str, object], rule: str) -> None:
    """A config that gives no layer is refused."""
    config = json.dumps(NEMOTRON | changes)

    with pytest.raises(InvalidError) as refusal:
        plan(PlanInputs(model_config=config, tokens_per_block=16, device_bytes=1 << 30))

    assert refusal.value.rule == rule
