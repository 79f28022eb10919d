"""Own the shapes of recurrent states, split over tensor ranks; a convolution's state is its last kernel - 1 inputs.

Mamba 1         conv (kernel - 1, width / ranks), state (width / ranks, state_size)
Mamba 2         conv (kernel - 1 + speculative, (width + 2 groups * state_size) / ranks), state (heads / ranks, head, n)
gated delta net conv (kernel - 1 + speculative, (2 dk hk + dv hv) / ranks), state (hv / ranks, dv, dk)
KDA             the gated delta net's with hv = hk and dv = dk, in float32
short conv      (kernel - 1, width / ranks)
linear          (heads / ranks, head, head)
"""

from dataclasses import dataclass

from kvlease.geometry import exact_div
from kvlease.spec import StateSpace
from kvleased.planning.models.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    """The dimensions of a Mamba 2 layer before it is split."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    kernel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """The dimensions of a gated delta net before it is split."""

    num_key_heads: int
    key_head_size: int
    num_value_heads: int
    value_head_size: int
    kernel: int


def mamba1(model: Model, name: str, *, width: int, state_size: int, kernel: int) -> StateSpace:
    """Return a Mamba 1 layer, which cannot take tokens back.

    Raises:
        InvalidError: ranks do not divide the width.
    """
    share = model.split(width, "the inner width of Mamba")
    return model.state(
        name,
        ((kernel - 1, share), model.dtype),
        ((share, state_size), _state_dtype(model, "float32")),
    )


def mamba2(model: Model, name: str, shape: Mamba2Shape) -> StateSpace:
    """Return a Mamba 2 layer; if groups are fewer than ranks, each rank has one group.

    Raises:
        InvalidError: ranks do not divide the heads, or they do not divide groups that are more than ranks.
    """
    heads = model.split(shape.num_heads, "heads of Mamba")
    has_copies = shape.num_groups < model.tensor_ranks
    groups = 1 if has_copies else model.split(shape.num_groups, "groups of Mamba")
    width = heads * shape.head_size + 2 * groups * shape.state_size
    return model.state(
        name,
        ((shape.kernel - 1 + model.speculative_tokens, width), model.dtype),
        ((heads, shape.head_size, shape.state_size), _state_dtype(model, "float32")),
        num_speculative_blocks=model.speculative_tokens,
        num_checkpoint_blocks=1,
        checkpoint_multiple_tokens=1,
    )


def delta_net(
    model: Model, name: str, shape: DeltaShape, *, state_dtype: str | None = None
) -> StateSpace:
    """Return a gated delta net; its state has the model's element type unless the config or `state_dtype` says another.

    Raises:
        InvalidError: ranks do not divide the heads.
    """
    keys = model.split(shape.num_key_heads, "K heads of linear attention") * shape.key_head_size
    heads = model.split(shape.num_value_heads, "V heads of linear attention")
    width = 2 * keys + heads * shape.value_head_size
    return model.state(
        name,
        ((shape.kernel - 1 + model.speculative_tokens, width), model.dtype),
        (
            (heads, shape.value_head_size, shape.key_head_size),
            state_dtype or _state_dtype(model, model.dtype),
        ),
        num_speculative_blocks=model.speculative_tokens,
    )


def short_convolution(model: Model, name: str, *, width: int, kernel: int) -> StateSpace:
    """Return a layer that keeps only the inputs of its convolution.

    Raises:
        InvalidError: ranks do not divide the width.
    """
    share = model.split(width, "the width of the convolution")
    return model.state(name, ((kernel - 1, share), model.dtype))


def linear(model: Model, name: str, *, num_heads: int, head_size: int) -> StateSpace:
    """Return a layer of linear (lightning) attention: one matrix a head.

    Raises:
        InvalidError: ranks do not divide the heads.
    """
    heads = model.split(num_heads, "heads of linear attention")
    return model.state(name, ((heads, head_size, head_size), model.dtype))


def inner_width(model: Model, factor_field: str) -> int:
    """Return the inner width of a recurrent layer: the factor in the config times the model's width.

    Raises:
        InvalidError: a field is missing.
    """
    config = model.config
    return config.count(factor_field) * config.count("hidden_size", "d_model")


def head_size_of(model: Model, name: str, *, width: int, num_heads: int) -> int:
    """Return the head size that a field gives; if the field is "auto" or missing, heads share the width.

    Raises:
        InvalidError: heads do not divide the width.
    """
    if model.config.value(name) in (None, "auto"):
        return exact_div(width, num_heads, what="the inner width of Mamba over its heads")
    return model.config.count(name)


def _state_dtype(model: Model, default: str) -> str:
    """Return the element type of states: the one in the config, else `default`."""
    said = model.config.value("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    return said if isinstance(said, str) and said != "auto" else default
