"""Own decoders whose layers are plain attention: over all tokens, a window, or a chunk."""

from typing import Final

from kvlease.spec import AttentionSpec, LayerSpec
from kvleased.planning.models.kinds import CHUNKED, FULL, SLIDING, kinds_of, kinds_with_period
from kvleased.planning.models.model import Heads, Model, heads_of
from kvleased.planning.models.parsing import Config
from kvleased.planning.models.refusals import unknown_architecture

_FOREIGN_FIELDS: Final = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "index_topk": "sparse attention with an indexer",
    "compress_ratios": "compressed attention",
    "per_layer_config": "layers of different shapes",
    "block_configs": "layers of different shapes",
    "hybrid_layer_pattern": "layers of different shapes",
    "swa_num_key_value_heads": "layers of different shapes",
    "layers_block_type": "layers of different kinds",
    "hybrid_override_pattern": "layers of different kinds",
    "attn_layer_period": "layers of different kinds",
    "attn_layer_indices": "layers of different kinds",
    "full_attention_interval": "layers of different kinds",
    "attn_type_list": "layers of different kinds",
    "attention_types": "layers of different kinds",
    "linear_num_key_heads": "linear attention",
    "linear_attn_config": "linear attention",
    "state_size": "a state-space model",
    "ssm_cfg": "a state-space model",
    "mamba_d_state": "a state-space model",
    "mamba_num_heads": "a state-space model",
    "ssm_state_size": "a state-space model",
    "conv_kernel": "a state-space model",
    "conv_L_cache": "short convolutions",
    "lru_width": "a recurrent layer",
    "qk_dim_factor": "a recurrent layer",
    "layer_group_size": "linear attention",
    "num_kv_shared_layers": "layers that share K and V",
    "use_cla": "layers that share K and V",
    "cross_attention_layers": "cross attention",
    "attention_chunk_size": "chunked local attention",
    "type_vocab_size": "an encoder, which keeps no KV cache",
    "multi_query": "its own way of counting K and V heads",
    "multi_query_attention": "its own way of counting K and V heads",
    "kv_channels": "its own way of giving head sizes",
    "global_head_dim": "its own way of giving head sizes",
}  # fmt: skip
"""Fields that mean something other than plain attention, unless they are null, false or 0."""


def plain(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of a decoder that says everything in the usual words, whatever its name.

    Raises:
        InvalidError: its config means something other than plain attention, or lacks what its layers need.
    """
    for name, meaning in _FOREIGN_FIELDS.items():
        if model.config.fields.get(name):
            raise unknown_architecture(f"the field {name!r} means {meaning}")
    if model.config.flag("is_encoder_decoder"):
        raise unknown_architecture("it is an encoder-decoder without the field 'decoder_layers'")
    return usual(model)


def usual(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of a decoder that is known to say everything that matters in the usual words.

    Raises:
        InvalidError: its config lacks what its layers need.
    """
    return attend(model, heads_of(model.config))


def llama4(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Llama 4: layers without rotary positions keep all tokens, the others keep a chunk.

    Raises:
        InvalidError: a field is missing.
    """
    config = model.config
    rotary = config.counts("no_rope_layers")
    if rotary and len(rotary) != config.num_layers:
        why = f"which are {len(rotary)} layers, but num_hidden_layers is {config.num_layers}"
        raise config.contradicts("no_rope_layers", rotary, why)
    interval = config.count("no_rope_layer_interval")
    kinds = kinds_with_period(config.num_layers, interval, between=CHUNKED)
    if rotary:
        kinds = tuple(CHUNKED if is_rotary else FULL for is_rotary in rotary)
    return attend(model, heads_of(config), kinds)


def attend(
    model: Model, heads: Heads, kinds: tuple[str, ...] | None = None
) -> tuple[AttentionSpec, ...]:
    """Return one attention layer for each kind; with None, the config gives the kinds.

    Raises:
        InvalidError: a kind is not attention, or a field is missing.
    """
    _refuse_other_kinds(model.config)
    kinds = kinds_of(model.config) if kinds is None else kinds
    return tuple(
        attention_of_kind(model, f"model.layers.{index}.self_attn", heads, kind)
        for index, kind in enumerate(kinds)
    )


def attention_of_kind(model: Model, name: str, heads: Heads, kind: str) -> AttentionSpec:
    """Return a layer of full, sliding or chunked attention.

    Raises:
        InvalidError: the window or the chunk is missing.
    """
    if kind == SLIDING:
        return model.sliding(name, heads, model.config.count("sliding_window"))
    if kind == CHUNKED:
        return model.chunked(name, heads, model.config.count("attention_chunk_size"))
    return model.full(name, heads)


def _refuse_other_kinds(config: Config) -> None:
    """Refuse kinds of layers that are not attention."""
    known = {FULL, SLIDING, CHUNKED, "attention", "global", "local", "sliding_window"}
    others = sorted({kind for kind in config.words("layer_types") if kind not in known})
    if others:
        raise unknown_architecture(f"the field 'layer_types' has {', '.join(others)}")
