"""Own models with an encoder: decoders that keep its output (Whisper, BART, T5), and encoders that keep nothing."""

from collections.abc import Mapping
from typing import Final

from kvlease.geometry import exact_div
from kvlease.spec import LayerSpec
from kvleased.planning.models.families.decoder import usual
from kvleased.planning.models.model import Heads, Model
from kvleased.planning.models.parsing import LAYERS_MAX, Config
from kvleased.planning.models.refusals import keeps_nothing

_INPUT_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "bart": ("max_source_positions", "max_position_embeddings"),
    "t5": ("n_positions",),
}
"""Fields that say how long an encoder's input may be; T5 has no limit, so this is the length it was trained on."""
_WHISPER_INPUT_TOKENS: Final = 1500
"""Tokens of half a minute of sound, which every Whisper model takes."""


def bart(model: Model) -> tuple[LayerSpec, ...]:
    """Return the decoder's layers of Whisper, BART and similar models, which have the field decoder_layers.

    Raises:
        InvalidError: a field is missing, or ranks do not divide the heads.
    """
    config = model.config
    num_heads = config.count("decoder_attention_heads")
    width = config.count("d_model", "hidden_size")
    head_size = exact_div(width, num_heads, what="d_model over decoder_attention_heads")
    heads = Heads(num_kv_heads=num_heads, head_size=head_size)
    num_layers = config.count("decoder_layers", most=LAYERS_MAX)
    return _with_cross_attention(model, heads, num_layers)


def t5(model: Model) -> tuple[LayerSpec, ...]:
    """Return the decoder's layers of T5 and similar models: num_decoder_layers if given, else as many as the encoder's.

    Raises:
        InvalidError: a field is missing, or ranks do not divide the heads.
    """
    config = model.config
    heads = Heads(num_kv_heads=config.count("num_heads"), head_size=config.count("d_kv"))
    num_layers = config.count("num_decoder_layers", "num_layers", most=LAYERS_MAX)
    return _with_cross_attention(model, heads, num_layers)


def encoder(model: Model) -> tuple[LayerSpec, ...]:
    """Refuse an encoder, which keeps nothing; if its config says that it is a decoder, return its layers.

    Raises:
        InvalidError: rule keeps_nothing.
    """
    if model.config.flag("is_decoder"):
        return usual(model)
    raise keeps_nothing(model.config.model_type)


def encoder_tokens_max(config: Config, family: str) -> int | None:
    """Return the tokens of the longest input that the encoder takes; None if the config does not say.

    Raises:
        InvalidError: the field is not a number of at least 1.
    """
    said = config.given_count(*_INPUT_FIELDS.get(family, ()))
    return said or (_WHISPER_INPUT_TOKENS if config.model_type == "whisper" else None)


def _with_cross_attention(model: Model, heads: Heads, num_layers: int) -> tuple[LayerSpec, ...]:
    layers: list[LayerSpec] = []
    for index in range(num_layers):
        layers.append(model.full(f"model.decoder.layers.{index}.self_attn", heads))
        layers.append(model.cross(f"model.decoder.layers.{index}.encoder_attn", heads))
    return tuple(layers)
