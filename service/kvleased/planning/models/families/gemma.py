"""Own Gemma 3n and Gemma 4, whose last layers read the K and V of earlier ones; Gemma 4 has heads of two sizes."""

from typing import Final

from kvlease.spec import LayerSpec
from kvleased.planning.models.families.decoder import attend, attention_of_kind
from kvleased.planning.models.kinds import FULL, kinds_of
from kvleased.planning.models.model import Heads, Model, heads_of
from kvleased.planning.models.parsing import Config

_PLACE_DIGITS_MAX: Final = 8
"""Digits of a place in `per_layer_config`; no layer has a longer one."""


def gemma3n(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Gemma 3n that keep K and V of their own.

    Raises:
        InvalidError: a field is missing.
    """
    return _keeping(model, attend(model, heads_of(model.config)))


def gemma4(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Gemma 4 that keep K and V of their own; full attention has another head size.

    Raises:
        InvalidError: a field is missing.
    """
    config = model.config
    local = heads_of(config)
    own = _own_heads(config, local)
    layers = []
    for index, kind in enumerate(kinds_of(config)):
        if own is not None:
            heads = own.get(index, local)
        elif kind == FULL:
            heads = _whole(config, local)
        else:
            heads = local
        layers.append(attention_of_kind(model, f"model.layers.{index}.self_attn", heads, kind))
    return _keeping(model, tuple(layers))


def _whole(config: Config, local: Heads) -> Heads:
    """Return the heads of a layer that sees all tokens, as published configs give them."""
    fewer = config.given_count("num_global_key_value_heads")
    is_fewer = fewer is not None and config.flag("attention_k_eq_v")
    return Heads(
        num_kv_heads=fewer if is_fewer and fewer else local.num_kv_heads,
        head_size=config.count("global_head_dim"),
    )


def _own_heads(config: Config, usual: Heads) -> dict[int, Heads] | None:
    """Return the heads that `per_layer_config` gives some layers, by place; None if there is no such field."""
    if config.value("per_layer_config") is None:
        return None
    places = config.inner("per_layer_config")
    found: dict[int, Heads] = {}
    for name in places.fields:
        is_place = name.isdecimal() and len(name) <= _PLACE_DIGITS_MAX
        if is_place and int(name) < config.num_layers and int(name) not in found:
            layer = places.inner(name)
            found[int(name)] = Heads(
                num_kv_heads=layer.given_count("num_key_value_heads") or usual.num_kv_heads,
                head_size=layer.given_count("head_dim") or usual.head_size,
            )
    return found


def _keeping(model: Model, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers without the last ones, which read what earlier layers keep."""
    shared = model.config.optional_count("num_kv_shared_layers") or 0
    if shared >= len(layers):
        raise model.config.contradicts(
            "num_kv_shared_layers", shared, f"but there are {len(layers)} layers"
        )
    return layers[: len(layers) - shared]
