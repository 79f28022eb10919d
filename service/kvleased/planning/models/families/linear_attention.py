"""Own models that have linear attention or short convolutions beside attention."""

from collections.abc import Callable, Sequence

from kvlease.spec import LayerSpec, StateSpace
from kvleased.planning.models.families.latent import latent_layer
from kvleased.planning.models.kinds import (
    CONVOLUTION,
    FULL,
    LINEAR,
    kinds_with_period,
    listed_kinds,
)
from kvleased.planning.models.model import Model, heads_of
from kvleased.planning.models.refusals import unknown_architecture
from kvleased.planning.models.states import DeltaShape, delta_net, linear, short_convolution


def qwen3_next(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Qwen3-Next, Qwen3.5 and OLMo hybrid: gated delta nets, with full attention in between.

    Raises:
        InvalidError: a field is missing, or ranks do not divide.
    """
    config = model.config
    shape = DeltaShape(
        num_key_heads=config.count("linear_num_key_heads"),
        key_head_size=config.count("linear_key_head_dim"),
        num_value_heads=config.count("linear_num_value_heads"),
        value_head_size=config.count("linear_value_head_dim"),
        kernel=config.count("linear_conv_kernel_dim"),
    )
    kinds = listed_kinds(config) or kinds_with_period(
        config.num_layers, config.count("full_attention_interval"), between=LINEAR
    )
    return _beside_attention(
        model, kinds, lambda name: delta_net(model, f"{name}.linear_attn", shape)
    )


def minimax(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of MiniMax: full attention where the list has a 1, else lightning attention.

    Raises:
        InvalidError: a field is missing, or ranks do not divide.
    """
    config = model.config
    heads = heads_of(config)
    listed = config.counts("attn_type_list")
    kinds = listed_kinds(config) or tuple(FULL if item == 1 else LINEAR for item in listed)
    if not kinds:
        raise config.lacks("attn_type_list")
    if len(kinds) != config.num_layers:
        why = f"which are {len(kinds)} layers, but num_hidden_layers is {config.num_layers}"
        raise config.contradicts("attn_type_list", listed, why)
    return _beside_attention(
        model,
        kinds,
        lambda name: linear(
            model,
            f"{name}.linear_attn",
            num_heads=config.count("num_attention_heads"),
            head_size=heads.head_size,
        ),
    )


def lfm2(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of LFM2: full attention where the list says so, else short convolutions.

    Raises:
        InvalidError: a field is missing, or ranks do not divide.
    """
    config = model.config
    places = set(config.counts("full_attn_idxs"))
    listed = listed_kinds(config)
    if not listed and not places:
        raise config.lacks("layer_types")
    kinds = listed or tuple(
        FULL if place in places else CONVOLUTION for place in range(config.num_layers)
    )
    return _beside_attention(
        model,
        kinds,
        lambda name: short_convolution(
            model,
            f"{name}.conv",
            width=config.count("conv_dim", "hidden_size"),
            kernel=config.count("conv_L_cache"),
        ),
    )


def kimi_linear(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Kimi-Linear: latent attention where the list says so, else Kimi delta attention.

    Raises:
        InvalidError: a field is missing, or ranks do not divide.
    """
    config = model.config
    is_flat = config.value("linear_attn_config") is None and "linear_num_heads" in config.fields
    said = config if is_flat else config.inner("linear_attn_config")
    num_heads = said.count("linear_num_heads" if is_flat else "num_heads")
    head_size = said.count("linear_head_dim" if is_flat else "head_dim")
    shape = DeltaShape(
        num_key_heads=num_heads,
        key_head_size=head_size,
        num_value_heads=num_heads,
        value_head_size=head_size,
        kernel=said.count("linear_conv_kernel_dim" if is_flat else "short_conv_kernel_size"),
    )
    listed = listed_kinds(config)
    places = set(said.counts("full_attn_layers"))
    kinds = listed or tuple(
        FULL if index + 1 in places else LINEAR for index in range(config.num_layers)
    )
    return tuple(
        latent_layer(model, f"model.layers.{index}.self_attn")
        if kind == FULL
        else delta_net(model, f"model.layers.{index}.linear_attn", shape, state_dtype="float32")
        for index, kind in enumerate(kinds)
    )


def _beside_attention(
    model: Model, kinds: Sequence[str], recurrent: Callable[[str], StateSpace]
) -> tuple[LayerSpec, ...]:
    """Return full attention for layers of that kind, and for the others what `recurrent` makes of the layer's name."""
    others = sorted(set(kinds) - {FULL, LINEAR, CONVOLUTION})
    if others:
        raise unknown_architecture(f"the field 'layer_types' has {', '.join(others)}")
    heads = heads_of(model.config)
    names = [f"model.layers.{index}" for index in range(len(kinds))]
    return tuple(
        model.full(f"{name}.self_attn", heads) if kind == FULL else recurrent(name)
        for name, kind in zip(names, kinds, strict=True)
    )
