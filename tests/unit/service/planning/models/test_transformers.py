"""Laws of configs as Transformers writes them: they are planned as deep as the class says, with its defaults."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoConfig

from kvleased.planning.models.defaults import DEFAULTS, NESTED_DEFAULTS
from kvleased.planning.models.registry import FAMILY_OF_TYPE
from tests.unit.service.planning.models.configs import layers

_NOT_IN_TRANSFORMERS = {
    "RefinedWeb",
    "RefinedWebModel",
    "chatglm",
    "kimi_k2",
    "minimax_m1",
    "minimax_text_01",
}
_KEEPS_NOTHING = {
    model_type for model_type, family in FAMILY_OF_TYPE.items() if family.__name__ == "encoder"
}
_USUAL_WORDS = (
    *("cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt_neox"),
    *("gpt_oss", "llama", "mistral", "mixtral", "ministral", "olmo2", "olmo3", "opt", "phi"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2"),
)
_TURNED_INTO_LAYERS = {"full_attention_interval", "global_head_dim"}
"""Fields that a class takes and does not keep; its layers show them."""
_HAS_LAYERS_BY_RULE = (
    *("cohere2", "exaone4", "gemma2", "gemma3_text", "gemma3n_text", "gpt_oss", "llama4_text"),
    *("olmo3", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)


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
    sorted({*FAMILY_OF_TYPE, *_USUAL_WORDS} - _NOT_IN_TRANSFORMERS - _KEEPS_NOTHING - {"lfm2_moe"}),
)
def test_configs_of_transformers_are_planned(model_type: str) -> None:
    """A class's own defaults, written as Transformers writes them, give layers of sound specs."""
    config = AutoConfig.for_model(model_type)

    found = layers(config.to_json_string(use_diff=False), "bfloat16")

    assert found


@pytest.mark.parametrize("model_type", _HAS_LAYERS_BY_RULE)
def test_layers_by_rule_are_those_of_the_class(model_type: str) -> None:
    """Where a config does not list its layers, they are of the kinds that the class gives them."""
    listed = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    names = ("layer_types", "no_rope_layers")
    by_rule = {name: value for name, value in listed.items() if name not in names}

    found = layers(json.dumps(by_rule), "bfloat16")

    assert found == layers(json.dumps(listed), "bfloat16")


def test_lengths_of_gemma4_heads_are_the_class() -> None:
    """Layers that see all tokens have the heads that the class gives them."""
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
    """What a config may leave out is what its class has in that place."""
    assert getattr(text_config(model_type), name) == value
