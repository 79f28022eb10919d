"""Own models that have Mamba 2 beside attention: Bamba, Granite hybrid, Falcon-H1, Zamba2 and Nemotron-H."""

from collections.abc import Iterable
from typing import Final

from kvlease.spec import LayerSpec
from kvleased.planning.models.kinds import FULL, HYBRID, LINEAR, NOTHING, listed_kinds
from kvleased.planning.models.model import Heads, Model, heads_of
from kvleased.planning.models.refusals import unknown_architecture
from kvleased.planning.models.states import Mamba2Shape, head_size_of, inner_width, mamba2

_KIND_OF_LETTER: Final = {"M": LINEAR, "*": FULL, "-": NOTHING, "E": NOTHING}
"""What each letter of Nemotron-H's `hybrid_override_pattern` means; feed-forward layers keep nothing."""


def bamba(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Bamba, which lists the places of its attention.

    Raises:
        InvalidError: a field is missing, or ranks do not divide.
    """
    indices = set(model.config.counts("attn_layer_indices"))
    kinds = tuple(FULL if place in indices else LINEAR for place in range(model.config.num_layers))
    return _mixed(model, kinds, _mamba_shape(model), heads_of(model.config))


def granite(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Granite hybrid, which lists what each layer is.

    Raises:
        InvalidError: a field is missing, or ranks do not divide.
    """
    kinds = listed_kinds(model.config)
    if not kinds:
        raise model.config.lacks("layer_types")
    shape = _mamba_shape(model) if LINEAR in kinds else None
    return _mixed(model, kinds, shape, heads_of(model.config))


def falcon_h1(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Falcon-H1, each of which is both Mamba 2 and attention.

    Raises:
        InvalidError: a field is missing, or ranks do not divide.
    """
    kinds = (HYBRID,) * model.config.num_layers
    return _mixed(model, kinds, _mamba_shape(model), heads_of(model.config))


def zamba2(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Zamba2: each has Mamba 2, and a "hybrid" one also has attention over twice the width.

    Raises:
        InvalidError: a field is missing, or ranks do not divide.
    """
    config = model.config
    kinds = listed_kinds(config)
    if not kinds:
        raise config.lacks("layers_block_type")
    num_heads = config.count("n_mamba_heads")
    shape = Mamba2Shape(
        num_heads=num_heads,
        head_size=head_size_of(
            model, "mamba_headdim", width=inner_width(model, "mamba_expand"), num_heads=num_heads
        ),
        num_groups=config.count("mamba_ngroups"),
        state_size=config.count("mamba_d_state"),
        kernel=config.count("mamba_d_conv"),
    )
    heads = heads_of(config)
    if not config.optional_count("attention_head_dim"):
        heads = Heads(num_kv_heads=heads.num_kv_heads, head_size=2 * heads.head_size)
    return _mixed(model, kinds, shape, heads)


def nemotron_h(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Nemotron-H, a pattern of Mamba 2, attention and feed-forward layers.

    Raises:
        InvalidError: a field is missing, the pattern has unknown letters or a wrong length, or ranks do not divide.
    """
    config = model.config
    shape = Mamba2Shape(
        num_heads=config.count("mamba_num_heads"),
        head_size=config.count("mamba_head_dim"),
        num_groups=config.count("n_groups"),
        state_size=config.count("ssm_state_size"),
        kernel=config.count("conv_kernel"),
    )
    return _mixed(model, _pattern(model), shape, heads_of(config))


def _pattern(model: Model) -> tuple[str, ...]:
    config = model.config
    pattern = config.value("hybrid_override_pattern")
    if pattern is None:
        listed = listed_kinds(config)
        if not listed:
            raise config.lacks("hybrid_override_pattern")
        return listed
    if not isinstance(pattern, str) or not set(pattern) <= set(_KIND_OF_LETTER):
        why = f"but its letters must be among {', '.join(_KIND_OF_LETTER)}"
        raise config.contradicts("hybrid_override_pattern", pattern, why)
    if len(pattern) != config.num_layers:
        why = f"which are {len(pattern)} layers, but num_hidden_layers is {config.num_layers}"
        raise config.contradicts("hybrid_override_pattern", pattern, why)
    return tuple(_KIND_OF_LETTER[letter] for letter in pattern)


def _mamba_shape(model: Model) -> Mamba2Shape:
    """Return the shape of Mamba 2 from the fields that Bamba, Granite hybrid and Falcon-H1 share."""
    config = model.config
    num_heads = config.count("mamba_n_heads")
    width = config.optional_count("mamba_d_ssm") or inner_width(model, "mamba_expand")
    return Mamba2Shape(
        num_heads=num_heads,
        head_size=head_size_of(model, "mamba_d_head", width=width, num_heads=num_heads),
        num_groups=config.count("mamba_n_groups"),
        state_size=config.count("mamba_d_state"),
        kernel=config.count("mamba_d_conv"),
    )


def _mixed(
    model: Model, kinds: Iterable[str], shape: Mamba2Shape | None, heads: Heads
) -> tuple[LayerSpec, ...]:
    """Return what layers of these kinds keep, in model order."""
    layers: list[LayerSpec] = []
    for index, kind in enumerate(kinds):
        if kind not in (FULL, LINEAR, HYBRID, NOTHING):
            raise unknown_architecture(f"the field 'layer_types' has {kind}")
        if kind in (LINEAR, HYBRID) and shape is not None:
            layers.append(mamba2(model, f"model.layers.{index}.mamba", shape))
        if kind in (FULL, HYBRID):
            layers.append(model.full(f"model.layers.{index}.self_attn", heads))
    return tuple(layers)
