"""Laws of reading a config.json: plain full attention is planned, everything else refused with a way out."""

import json
from typing import Any

import pytest
from transformers import (
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvlease.errors import InvalidError
from kvlease.plan import PlanInputs
from kvleased.planning import plan
from kvleased.planning.model import layers_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def text(**changes: object) -> str:
    """Return the text of a Llama config with some fields changed; None takes a field away."""
    return json.dumps(
        {name: value for name, value in (LLAMA | changes).items() if value is not None}
    )


def test_llama_8b_is_planned_to_known_numbers() -> None:
    """Llama 3 8B keeps 128 KiB a token: 32 layers * 8 heads * (128 + 128) * 2 bytes; 8 GiB hold 4096 blocks."""
    layout = plan(PlanInputs(model_config=text(), tokens_per_block=16, device_bytes=8 * 2**30))

    assert layout.bytes_per_token == 128 * 1024
    assert layout.bytes_per_block == 2 * 2**20
    assert layout.num_blocks == 4096
    assert layout.longest_request_tokens == 65536


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LlamaConfig(num_key_value_heads=8), id="llama"),
        pytest.param(MistralConfig(sliding_window=None), id="mistral without a window"),
        pytest.param(Qwen2Config(), id="qwen2"),
        pytest.param(Qwen3Config(head_dim=128), id="qwen3"),
        pytest.param(Phi3Config(sliding_window=None), id="phi3"),
    ],
)
def test_plain_decoders_of_transformers_are_planned(config: PretrainedConfig) -> None:
    """Configs as Transformers writes them give one layer each, with the heads that the model will have."""
    layers = layers_of(config.to_json_string(use_diff=False), "float16")

    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    assert len(layers) == config.num_hidden_layers
    assert {(layer.num_kv_heads, layer.head_size) for layer in layers} == {
        (config.num_key_value_heads, head_size)
    }


@pytest.mark.parametrize(
    ("changes", "num_kv_heads", "head_size"),
    [
        pytest.param({"num_key_value_heads": None}, 32, 128, id="as many K heads as heads"),
        pytest.param({"head_dim": 64}, 8, 64, id="head size of its own"),
        pytest.param(
            {"hidden_size": None, "head_dim": 64}, 8, 64, id="head size instead of hidden size"
        ),
        pytest.param(
            {"sliding_window": 4096, "use_sliding_window": False}, 8, 128, id="window off"
        ),
        pytest.param(
            {"sliding_window": 4096, "max_position_embeddings": 4096}, 8, 128, id="idle window"
        ),
        pytest.param({"layer_types": ["full_attention"] * 32}, 8, 128, id="all layers full"),
    ],
)
def test_ways_to_say_full_attention_are_understood(
    changes: dict[str, object], num_kv_heads: int, head_size: int
) -> None:
    """Defaults of the config format are its own, and a window that never cuts is none."""
    layer = layers_of(text(**changes))[0]

    assert (layer.num_kv_heads, layer.head_size, layer.head_size_v) == (
        num_kv_heads,
        head_size,
        head_size,
    )


@pytest.mark.parametrize(
    ("changes", "meaning"),
    [
        pytest.param({"sliding_window": 4096}, "sliding_window", id="sliding window"),
        pytest.param(
            {"sliding_window": 4096, "max_position_embeddings": 8192},
            "sliding_window",
            id="window that cuts",
        ),
        pytest.param({"sliding_window": [1, 2]}, "sliding_window", id="windows of some kind"),
        pytest.param({"layer_types": ["full_attention", "mamba"]}, "mamba", id="layer types"),
        pytest.param({"layer_types": 7}, "layer_types", id="layer types that are no list"),
        pytest.param({"kv_lora_rank": 512}, "latent", id="MLA"),
        pytest.param({"attention_chunk_size": 8192}, "chunked", id="chunks"),
        pytest.param({"mamba_d_state": 16}, "state-space", id="mamba"),
        pytest.param({"text_config": {"hidden_size": 1}}, "multimodal", id="nested"),
        pytest.param({"is_encoder_decoder": True}, "encoder-decoder", id="encoder-decoder"),
        pytest.param({"type_vocab_size": 2}, "encoder", id="encoder"),
        pytest.param({"num_hidden_layers": None}, "num_hidden_layers", id="lacks layers"),
        pytest.param({"hidden_size": None}, "hidden_size", id="lacks sizes"),
    ],
)
def test_other_models_are_refused_with_a_way_out(changes: dict[str, object], meaning: str) -> None:
    """What is not plain full attention is refused by name, and the refusal says how to give layers by hand."""
    with pytest.raises(InvalidError, match=meaning) as refusal:
        layers_of(text(**changes))

    assert "PlanInputs(layers=(FullAttention(" in refusal.value.message


@pytest.mark.parametrize(
    ("config_text", "complaint"),
    [
        pytest.param("{", "not the text", id="no JSON"),
        pytest.param("[" * 100_000, "not the text", id="nested beyond reason"),
        pytest.param("[]", "must be a JSON object", id="no object"),
        pytest.param(" " * (2**20 + 1), "characters", id="too long"),
        pytest.param(text(torch_dtype=None), "kv_dtype", id="no dtype"),
        pytest.param(text(torch_dtype=5), "kv_dtype", id="dtype of a wrong type"),
        pytest.param(
            text(hidden_size=4097), "hidden_size over num_attention_heads", id="heads do not divide"
        ),
        pytest.param(text(num_attention_heads="32"), "num_attention_heads", id="text for a number"),
        pytest.param(text(num_hidden_layers=10**12), "num_hidden_layers", id="too deep"),
        pytest.param(text(num_key_value_heads=-1), "num_key_value_heads", id="negative heads"),
    ],
)
def test_malformed_config_is_refused(config_text: str, complaint: str) -> None:
    """Text that is no usable config is refused with what is wrong, whatever it is."""
    with pytest.raises(InvalidError, match=complaint):
        layers_of(config_text)


@pytest.mark.parametrize(
    ("changes", "kv_dtype", "dtype"),
    [
        pytest.param({}, "", "bfloat16", id="the model's"),
        pytest.param({"dtype": "float32"}, "", "float32", id="newer name of the field"),
        pytest.param({"torch_dtype": "torch.float16"}, "", "float16", id="as torch prints it"),
        pytest.param({}, "float8_e4m3fn", "float8_e4m3fn", id="the cache's own"),
    ],
)
def test_dtype_is_the_models_unless_given(
    changes: dict[str, object], kv_dtype: str, dtype: str
) -> None:
    """The cache has the model's element type unless it is given its own."""
    assert layers_of(text(**changes), kv_dtype)[0].dtype == dtype
