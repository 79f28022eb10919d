"""Own models with Mamba 1 or Mamba 2 layers alone, and Jamba, which has Mamba 1 layers beside attention."""

from kvlease.spec import LayerSpec
from kvleased.planning.models.model import Model, heads_of
from kvleased.planning.models.states import (
    Mamba2Shape,
    head_size_of,
    inner_width,
    mamba1,
    mamba2,
)


def mamba_1(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Mamba and Falcon-Mamba.

    Raises:
        InvalidError: a field is missing, or ranks do not divide the width.
    """
    config = model.config
    width = config.optional_count("intermediate_size") or inner_width(model, "expand")
    return tuple(
        mamba1(
            model,
            f"backbone.layers.{index}.mixer",
            width=width,
            state_size=config.count("state_size"),
            kernel=config.count("conv_kernel"),
        )
        for index in range(config.num_layers)
    )


def mamba_2(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Mamba 2.

    Raises:
        InvalidError: a field is missing, or ranks do not divide heads or groups.
    """
    config = model.config
    num_heads = config.count("num_heads")
    shape = Mamba2Shape(
        num_heads=num_heads,
        head_size=head_size_of(
            model, "head_dim", width=inner_width(model, "expand"), num_heads=num_heads
        ),
        num_groups=config.count("n_groups"),
        state_size=config.count("state_size"),
        kernel=config.count("conv_kernel"),
    )
    return tuple(
        mamba2(model, f"backbone.layers.{index}.mixer", shape) for index in range(config.num_layers)
    )


def jamba(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Jamba: one attention layer in every `attn_layer_period`, the others Mamba 1.

    Raises:
        InvalidError: a field is missing, or ranks do not divide.
    """
    config = model.config
    period, offset = config.count("attn_layer_period"), config.optional_count("attn_layer_offset")
    heads = heads_of(config)
    return tuple(
        model.full(f"model.layers.{index}.self_attn", heads)
        if index % period == (offset or 0)
        else mamba1(
            model,
            f"model.layers.{index}.mamba",
            width=inner_width(model, "mamba_expand"),
            state_size=config.count("mamba_d_state"),
            kernel=config.count("mamba_d_conv"),
        )
        for index in range(config.num_layers)
    )
