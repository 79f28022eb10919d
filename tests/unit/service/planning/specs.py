"""Build small layers for the laws of grouping; each call changes the fields that matter."""

from dataclasses import replace
from typing import Any

from kvlease.layout import Layout
from kvlease.plan import EngineInputs
from kvlease.spec import (
    MLA,
    ChunkedLocal,
    FullAttention,
    HiddenState,
    LayerSpec,
    SlidingWindow,
    SlidingWindowMLA,
    StateSpace,
)
from kvleased.planning.groups.grouping import Group, group_layers

_ATTENTION: dict[str, Any] = {
    "tokens_per_block": 16,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": "float16",
}
_LATENT: dict[str, Any] = {"tokens_per_block": 16, "head_size": 64, "dtype": "uint8"}


def full(name: str = "full", **changes: Any) -> FullAttention:
    """Return full attention with pages of 8192 bytes."""
    return FullAttention(**{"name": name, **_ATTENTION, **changes})


def window(name: str = "window", **changes: Any) -> SlidingWindow:
    """Return a window of 128 tokens with pages of 8192 bytes."""
    return SlidingWindow(**{"name": name, "window_tokens": 128, **_ATTENTION, **changes})


def chunk(name: str = "chunk", **changes: Any) -> ChunkedLocal:
    """Return chunks of 64 tokens with pages of 8192 bytes."""
    return ChunkedLocal(**{"name": name, "chunk_tokens": 64, **_ATTENTION, **changes})


def latent(name: str = "latent", **changes: Any) -> MLA:
    """Return latent attention with pages of 1024 bytes."""
    return MLA(**{"name": name, **_LATENT, **changes})


def latent_window(name: str = "latent_window", **changes: Any) -> SlidingWindowMLA:
    """Return a latent window of 128 tokens with pages of 1024 bytes."""
    return SlidingWindowMLA(**{"name": name, "window_tokens": 128, **_LATENT, **changes})


def hidden(name: str = "hidden", **changes: Any) -> HiddenState:
    """Return hidden states of 64 bytes a token."""
    return HiddenState(**{"name": name, **_LATENT, **changes})


def states(name: str = "state", **changes: Any) -> StateSpace:
    """Return a recurrent layer with a state of 4096 bytes."""
    fields = {"tokens_per_block": 16, "shapes": ((2, 1024),), "dtypes": ("float16",)}
    return StateSpace(**{"name": name, **fields, **changes})


def times(spec: LayerSpec, count: int) -> list[LayerSpec]:
    """Return so many layers of a spec, with numbered names."""
    return [replace(spec, name=f"{spec.name}.{i}") for i in range(count)]


def grouped(*layers: LayerSpec, layout: str = "LBNHC", **engine: Any) -> tuple[Group, ...]:
    """Return the groups of layers."""
    return group_layers(layers, layout=Layout(layout), engine=EngineInputs(**engine))


def names(groups: tuple[Group, ...]) -> list[list[str]]:
    """Return the names of each group's layers."""
    return [list(group.layer_names) for group in groups]
