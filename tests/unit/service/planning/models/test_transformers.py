"""Laws of configs as Transformers writes them: they give the class's layers, with the class's defaults."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoConfig

from kvleased.planning.models.defaults import (
    DEFAULTS,
    KV_HEADS_OF_CLASS,
    NESTED_DEFAULTS,
)
from kvleased.planning.models.known_types import PLAIN_TYPES, TYPES_OF_FAMILY
from kvleased.planning.models.registry import FAMILY_OF_TYPE
from tests.unit.service.planning.models.configs import layers

_NOT_IN_TRANSFORMERS = {
    *("RefinedWeb", "RefinedWebModel", "aquila", "arctic", "baichuan", "bailing_moe", "chatglm"),
    *("deepseek", "exaone", "internlm", "internlm2", "kimi_k2", "mimo", "minicpm", "minimax_m1"),
    *("minimax_text_01", "orion", "phi3_v", "phi4mm", "solar", "xverse"),
}
_SHAPES_THAT_DO_NOT_DIVIDE = {"glm4_moe", "glm4v_moe_text", "lfm2_moe", "qwen3_omni_moe_text"}
"""Classes whose defaults are no usable model: their published configs give the head size."""
_KEEPS_NOTHING = {
    model_type for model_type, family in FAMILY_OF_TYPE.items() if family.__name__ == "encoder"
}
_WHOLE_MODELS = {"gemma3", "llava", "qwen2_audio", "voxtral"}
_TURNED_INTO_LAYERS = {"full_attention_interval", "global_head_dim"}
"""Fields that a class accepts but does not keep; their effect shows in its layers."""
_HAS_LAYERS_BY_RULE = (
    *("cohere2", "exaone4", "gemma2", "gemma3_text", "gemma3n_text", "gpt_oss", "llama4_text"),
    *("olmo3", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)


def test_every_rule_that_has_architectures_is_one() -> None:
    """Each rule's name is that of a function, and no architecture has two rules."""
    names = [model_type for types in TYPES_OF_FAMILY.values() for model_type in types]

    assert {family.__name__ for family in FAMILY_OF_TYPE.values()} == set(TYPES_OF_FAMILY)
    assert len(names) == len(set(names)) == len(FAMILY_OF_TYPE)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep the classes' advice out of the output."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def text_config(model_type: str) -> Any:
    """Return the config of the text model of an architecture, with the class's defaults."""
    config = AutoConfig.for_model(model_type).get_text_config(decoder=True)
    config.allow_global_per_layer_attribute_access = True
    return config


@pytest.mark.parametrize(
    "model_type",
    sorted(
        {*FAMILY_OF_TYPE, *_WHOLE_MODELS}
        - _NOT_IN_TRANSFORMERS
        - _KEEPS_NOTHING
        - _SHAPES_THAT_DO_NOT_DIVIDE
    ),
)
def test_configs_of_transformers_are_planned(model_type: str) -> None:
    """A class's defaults, as Transformers writes them, give layers with valid specs."""
    config = AutoConfig.for_model(model_type)

    found = layers(config.to_json_string(use_diff=False), "bfloat16")

    assert found


@pytest.mark.parametrize("model_type", _HAS_LAYERS_BY_RULE)
def test_layers_by_rule_are_those_of_the_class(model_type: str) -> None:
    """If a config does not list its layers, they have the kinds that its class gives them."""
    listed = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    names = ("layer_types", "no_rope_layers")
    by_rule = {name: value for name, value in listed.items() if name not in names}

    found = layers(json.dumps(by_rule), "bfloat16")

    assert found == layers(json.dumps(listed), "bfloat16")


def test_lengths_of_gemma4_heads_are_the_class() -> None:
    """Layers that see all tokens have the class's heads, with and without per_layer_config."""
    listed = json.loads(AutoConfig.for_model("gemma4_text").to_json_string(use_diff=False))
    published = {name: value for name, value in listed.items() if name != "per_layer_config"}

    found = layers(json.dumps(published), "bfloat16")

    assert found == layers(json.dumps(listed), "bfloat16")


@pytest.mark.parametrize(
    ("model_type", "name", "value"),
    [
        pytest.param(model_type, name, value, id=f"{model_type} {name}")
        for table in (DEFAULTS, NESTED_DEFAULTS)
        for model_type, fields in table.items()
        for name, value in fields.items()
        if name not in _TURNED_INTO_LAYERS
    ],
)
def test_defaults_are_those_of_the_classes(model_type: str, name: str, value: object) -> None:
    """A field that a config may leave out has its class's default."""
    assert getattr(text_config(model_type), name) == value


@pytest.mark.parametrize("model_type", sorted({*PLAIN_TYPES} - _NOT_IN_TRANSFORMERS))
def test_heads_that_a_config_leaves_out_are_those_of_q_where_its_class_says_so(
    model_type: str,
) -> None:
    """A config may leave out its K and V heads only if its class then has as many as heads of Q."""
    config = text_config(model_type)

    number = getattr(config, "num_key_value_heads", None)

    if number not in (None, config.num_attention_heads):
        assert model_type in KV_HEADS_OF_CLASS
