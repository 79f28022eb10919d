"""Own which layers vLLM 0.32 gives a window where a config does not list them: every one, however long the window."""

from collections.abc import Mapping
from typing import Any, Final

_WINDOW_IN_EVERY_LAYER: Final = frozenset(("mistral", "mixtral", "phi3", "phimoe", "starcoder2"))
"""The model_type of models whose layers all have the window of their config."""
_LAYERS_MAX: Final = 4096
"""Layers of the deepest model that is planned."""


def with_windows(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's words, with its windows listed layer by layer.

    A window that is as long as the model's positions cuts nothing, and yet vLLM counts the block more that one takes.
    """
    window, num_layers = words.get("sliding_window"), words.get("num_hidden_layers")
    is_everywhere = words.get("model_type") in _WINDOW_IN_EVERY_LAYER and window
    if not is_everywhere or words.get("layer_types"):
        return dict(words)
    if not isinstance(num_layers, int) or num_layers > _LAYERS_MAX:
        # The planner says what is wrong with a number of layers.
        return dict(words)
    return {**words, "layer_types": ["sliding_attention"] * num_layers}
