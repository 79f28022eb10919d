"""Laws of encoders: a decoder keeps the encoder's output beside its own tokens; an encoder alone keeps nothing."""

from typing import Any

import pytest

from kvlease.errors import InvalidError
from kvlease.plan import ParallelInputs, PlanInputs
from kvlease.spec import AttentionSpec
from kvleased.planning import plan
from kvleased.planning.models import model_facts
from tests.unit.service.planning.models.configs import config_text, layers


@pytest.mark.parametrize(
    ("fixture", "ranks", "num_layers", "num_kv_heads"),
    [
        pytest.param("whisper-large-v3", 1, 32, 20, id="whisper"),
        pytest.param("whisper-large-v3", 4, 32, 5, id="whisper tp4"),
        pytest.param("bart-large", 1, 12, 16, id="bart"),
        pytest.param("flan-t5-xl", 2, 24, 16, id="t5 tp2"),
    ],
)
def test_decoders_keep_tokens_and_the_encoders_output(
    fixture: str, ranks: int, num_layers: int, num_kv_heads: int
) -> None:
    """Each layer of the decoder keeps its tokens and the encoder's output, with the decoder's heads."""
    found = layers(config_text(fixture), "bfloat16", ranks=ranks)

    assert [layer.kind for layer in found] == ["full_attention", "cross_attention"] * num_layers
    assert {_heads(layer) for layer in found} == {(num_kv_heads, 64)}


def test_t5_decoder_is_as_deep_as_its_encoder_unless_said() -> None:
    """Without num_decoder_layers, num_layers is the depth of both."""
    text = config_text("flan-t5-xl", num_decoder_layers=None, num_layers=3)

    assert len(layers(text)) == 2 * 3


@pytest.mark.parametrize(
    ("fixture", "field"),
    [
        pytest.param("bart-large", "decoder_layers", id="bart"),
        pytest.param("whisper-large-v3", "decoder_layers", id="whisper"),
        pytest.param("flan-t5-xl", "num_decoder_layers", id="t5"),
    ],
)
def test_stages_share_the_decoders_layers(fixture: str, field: str) -> None:
    """If the decoder has fewer layers than the encoder, stages still keep equally many of them."""
    text = config_text(fixture, **{field: 4})
    inputs = PlanInputs(
        model_config=text,
        kv_dtype="bfloat16",
        tokens_per_block=16,
        device_bytes=2**30,
        parallel=ParallelInputs(pipeline_ranks=2),
    )

    assert model_facts(text).num_hidden_layers == 4
    assert [len(rank.layers) for rank in plan(inputs).ranks] == [2 * 2, 2 * 2]


@pytest.mark.parametrize(
    ("fixture", "field"),
    [
        pytest.param("bart-large", "decoder_layers", id="bart"),
        pytest.param("flan-t5-xl", "num_decoder_layers", id="t5"),
    ],
)
def test_decoder_that_is_too_deep_is_refused_before_it_is_made(fixture: str, field: str) -> None:
    """Making millions of layers, only to count them, would take all memory."""
    with pytest.raises(InvalidError, match=f"{field}.*from 1 to 4096"):
        layers(config_text(fixture, **{field: 2**24}), "bfloat16")


def test_encoder_decoder_of_another_name_is_refused() -> None:
    """An unknown architecture with decoder_layers is refused, since it may not be laid out as BART is."""
    with pytest.raises(InvalidError, match="unheard_of") as refusal:
        layers(config_text("bart-large", model_type="unheard_of"))

    assert refusal.value.rule == "unknown_architecture"


@pytest.mark.parametrize(
    ("fixture", "changes", "encoder_tokens"),
    [
        pytest.param("whisper-large-v3", {}, 1500, id="whisper"),
        pytest.param("whisper-large-v3", {"max_source_positions": None}, 1500, id="any whisper"),
        pytest.param("bart-large", {}, 1024, id="bart"),
        pytest.param("flan-t5-xl", {}, 512, id="t5"),
        pytest.param("flan-t5-xl", {"n_positions": None}, None, id="t5 without a limit"),
        pytest.param("llama3-8b", {}, None, id="no encoder"),
    ],
)
def test_longest_encoder_input_is_the_configs(
    fixture: str, changes: dict[str, Any], encoder_tokens: int | None
) -> None:
    """The encoder's positions limit its input; with relative positions only the config can."""
    assert model_facts(config_text(fixture, **changes)).encoder_tokens_max == encoder_tokens


def test_encoder_keeps_nothing() -> None:
    """BERT is refused with the reason, and without a way to plan it."""
    with pytest.raises(InvalidError, match="bert is an encoder") as refusal:
        layers(config_text("bert-base"), "float32")

    assert refusal.value.rule == "keeps_nothing"


def test_encoder_that_is_a_decoder_is_planned() -> None:
    """BERT with is_decoder generates, so it keeps K and V."""
    found = layers(config_text("bert-base", is_decoder=True), "float32")

    assert [layer.kind for layer in found] == ["full_attention"] * 12


def test_facts_are_what_the_config_says() -> None:
    """The facts are class, rule, positions, the weights' type, depth and the encoder's longest input."""
    facts = model_facts(config_text("whisper-large-v3"))

    assert facts.architecture == "WhisperForConditionalGeneration"
    assert facts.family == "bart"
    assert (facts.max_position_tokens, facts.encoder_tokens_max) == (448, 1500)
    assert (facts.dtype, facts.num_hidden_layers) == ("float16", 32)


def test_facts_that_a_config_does_not_say_are_empty() -> None:
    """Without architectures the model_type takes their place; positions and the weights' type may be unknown."""
    facts = model_facts('{"model_type": "mamba", "n_layer": 4}')

    assert (facts.architecture, facts.family, facts.dtype) == ("mamba", "mamba_1", "")
    assert (facts.max_position_tokens, facts.encoder_tokens_max) == (None, None)


def _heads(layer: object) -> tuple[int, int]:
    assert isinstance(layer, AttentionSpec)
    return layer.num_kv_heads, layer.head_size
