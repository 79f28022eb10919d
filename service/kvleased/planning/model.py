"""Own what a Hugging Face config.json says of a model's layers; what it does not say for certain is refused.

Planned so far: decoders whose every layer is plain full attention (Llama, Mistral without a window, Qwen2, Qwen3,
Phi-3, Granite, OLMo, their mixture-of-experts kin …), recognised by their fields, not by their name.
"""

import json
from typing import Any, Final

from kvlease.errors import InvalidError
from kvlease.geometry import exact_div
from kvlease.spec import FullAttention
from kvlease.units import TOKENS_MAX, checked_count

LAYERS_MAX: Final = 4096
"""Layers of the deepest model that is planned."""

_CONFIG_CHARACTERS_MAX: Final = 2**20
_DIMENSION_MAX: Final = 2**24
_BY_HAND: Final = (
    "give the layers by hand instead: "
    "PlanInputs(layers=(FullAttention(name=…, num_kv_heads=…, head_size=…, dtype=…), …))"
)

_UNSUPPORTED_FIELDS: Final = {
    "text_config": "a model inside a model (multimodal)",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "index_topk": "sparse attention with an indexer",
    "compress_ratios": "compressed attention",
    "attention_chunk_size": "chunked local attention",
    "block_configs": "layers of different shapes",
    "layers_block_type": "layers of different kinds",
    "hybrid_override_pattern": "layers of different kinds",
    "attn_layer_period": "layers of different kinds",
    "attn_layer_indices": "layers of different kinds",
    "full_attention_interval": "layers of different kinds",
    "linear_num_key_heads": "linear attention",
    "linear_attn_config": "linear attention",
    "state_size": "a state-space model",
    "ssm_cfg": "a state-space model",
    "mamba_d_state": "a state-space model",
    "mamba_num_heads": "a state-space model",
    "ssm_state_size": "a state-space model",
    "conv_kernel": "a state-space model",
    "conv_L_cache": "short convolutions",
    "num_kv_shared_layers": "layers that share K and V",
    "cross_attention_layers": "cross attention",
    "type_vocab_size": "an encoder, which keeps no KV cache",
    "multi_query": "its own way to count K and V heads",
    "multi_query_attention": "its own way to count K and V heads",
    "kv_channels": "its own way to say head sizes",
}  # fmt: skip
"""Fields that mean something other than plain full attention, unless they are null, false or 0."""


def layers_of(config_text: str, kv_dtype: str = "") -> tuple[FullAttention, ...]:
    """Return the layers of the model that the text of a config.json describes.

    `kv_dtype` is the element type of the cache; empty takes the model's own.

    Raises:
        InvalidError: the text is no such config, lacks a field, or describes more than plain full attention.
    """
    config = _parsed(config_text)
    _refuse_unsupported(config)
    num_layers = _dimension(config, "num_hidden_layers", LAYERS_MAX)
    num_heads = _dimension(config, "num_attention_heads")
    num_kv_heads = (
        _dimension(config, "num_key_value_heads")
        if config.get("num_key_value_heads")
        else num_heads
    )
    exact_div(num_heads, num_kv_heads, what="num_attention_heads over num_key_value_heads")
    if config.get("head_dim"):
        head_size = _dimension(config, "head_dim")
    else:
        head_size = exact_div(
            _dimension(config, "hidden_size"),
            num_heads,
            what="hidden_size over num_attention_heads",
        )
    dtype = kv_dtype or _dtype(config)
    return tuple(
        FullAttention(
            name=f"model.layers.{index}.self_attn",
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            head_size_v=head_size,
            dtype=dtype,
        )
        for index in range(num_layers)
    )


def _parsed(config_text: str) -> dict[str, Any]:
    if len(config_text) > _CONFIG_CHARACTERS_MAX:
        message = f"model_config has {len(config_text)} characters; at most {_CONFIG_CHARACTERS_MAX} are read"
        raise InvalidError(
            message, resource="model_config", need=len(config_text), limit=_CONFIG_CHARACTERS_MAX
        )
    try:
        config = json.loads(config_text)
    except (ValueError, RecursionError) as error:
        message = f"model_config is not the text of a config.json: {error}"
        raise InvalidError(message, resource="model_config") from error
    if not isinstance(config, dict):
        message = f"model_config must be a JSON object, not {type(config).__name__}"
        raise InvalidError(message, resource="model_config")
    return config


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """Refuse everything that is not certainly plain full attention in every layer."""
    for name, meaning in _UNSUPPORTED_FIELDS.items():
        if config.get(name):
            raise _unsupported(f"the field {name!r} means {meaning}")
    if config.get("is_encoder_decoder"):
        raise _unsupported("it is an encoder-decoder")
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and not _is_idle_window(window, config):
        raise _unsupported(
            f"the field 'sliding_window' is {window!r}: its layers keep a window of the tokens only"
        )
    kinds = config.get("layer_types") or []
    others = (
        sorted({str(kind)[:40] for kind in kinds if kind != "full_attention"})
        if isinstance(kinds, list)
        else ["?"]
    )
    if others:
        raise _unsupported(f"the field 'layer_types' has {', '.join(others)}")


def _is_idle_window(window: object, config: dict[str, Any]) -> bool:
    """Tell whether no position that the model knows ever leaves the window."""
    positions = config.get("max_position_embeddings")
    return isinstance(window, int) and isinstance(positions, int) and window >= positions


def _dimension(config: dict[str, Any], name: str, most: int = _DIMENSION_MAX) -> int:
    if config.get(name) is None:
        raise _unsupported(f"it lacks the field {name!r}")
    return checked_count(name, config[name], least=1, most=min(most, TOKENS_MAX))


def _dtype(config: dict[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(dtype, str):
        message = "model_config names no dtype; give kv_dtype, for example bfloat16"
        raise InvalidError(message, resource="kv_dtype")
    return dtype.removeprefix("torch.")


def _unsupported(why: str) -> InvalidError:
    return InvalidError(
        f"this model cannot be planned from its config yet: {why}; {_BY_HAND}",
        resource="model_config",
    )
