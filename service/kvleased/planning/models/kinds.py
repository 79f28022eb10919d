"""Own which kind each layer is, in one set of words for all the ways in which configs say it."""

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Final

from kvlease.errors import InvalidError
from kvleased.planning.models.parsing import Config
from kvleased.planning.models.refusals import unknown_architecture

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"
LINEAR: Final = "linear_attention"
HYBRID: Final = "hybrid"
CONVOLUTION: Final = "conv"
NOTHING: Final = "mlp"

_OTHER_WORDS: Final[Mapping[str, str]] = {
    "attention": FULL,
    "global": FULL,
    "local": SLIDING,
    "sliding_window": SLIDING,
    "mamba": LINEAR,
    "mamba2": LINEAR,
    "short_conv": CONVOLUTION,
    "moe": NOTHING,
}

_PERIOD_OF_TYPE: Final[Mapping[str, int]] = {
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
}
"""Architectures in which the last layer of every so many is full and the others keep a window."""
_WINDOW_IN_EVERY_LAYER: Final = ("ministral", "mistral", "mixtral", "phi3", "phimoe", "starcoder2")
_WINDOW_IN_DEEP_LAYERS: Final = (
    "qwen2",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    "qwen2_moe",
    "qwen2_vl",
    "qwen2_vl_text",
    "qwen3",
)
"""Architectures whose layers from `max_window_layers` on keep a window, if use_sliding_window is set."""


def kinds_of(config: Config) -> tuple[str, ...]:
    """Return the kind of every layer, in model order.

    Raises:
        InvalidError: the config does not name exactly num_hidden_layers kinds, or does not say which layers keep a
            window.
    """
    return listed_kinds(config) or _kinds_by_rule(config, config.num_layers)


def listed_kinds(config: Config) -> tuple[str, ...]:
    """Return the kinds that the config lists layer by layer; none if it lists no kinds.

    Raises:
        InvalidError: it does not list exactly num_hidden_layers kinds.
    """
    words = config.words("layer_types", "layers_block_type")
    if words and len(words) != config.num_layers:
        why = f"which are {len(words)} layers, but num_hidden_layers is {config.num_layers}"
        raise config.contradicts("layer_types", ", ".join(sorted(set(words))), why)
    return tuple(_OTHER_WORDS.get(word, word) for word in words)


def kinds_with_period(num_layers: int, period: int, *, between: str) -> tuple[str, ...]:
    """Return kinds: the last layer of every `period` is full attention, and the others are `between`."""
    return tuple(FULL if (index + 1) % period == 0 else between for index in range(num_layers))


def _kinds_by_rule(config: Config, num_layers: int) -> tuple[str, ...]:
    """Return the kinds that an architecture has when its config does not list them."""
    window = _window_of(config)
    pattern = config.value("sliding_window_pattern", "_sliding_window_pattern")
    period = _PERIOD_OF_TYPE.get(config.model_type)
    if window is not None and isinstance(pattern, str) and pattern:
        letters = islice(cycle(pattern[:num_layers]), num_layers)
        return tuple(FULL if letter == "G" else SLIDING for letter in letters)
    if window is not None and period:
        said = config.optional_count("sliding_window_pattern", "_sliding_window_pattern")
        return kinds_with_period(num_layers, said or period, between=SLIDING)
    if window is None or _is_idle(window, config):
        return (FULL,) * num_layers
    if config.model_type in _WINDOW_IN_EVERY_LAYER:
        return (SLIDING,) * num_layers
    if config.model_type in _WINDOW_IN_DEEP_LAYERS:
        first = min(num_layers, config.optional_count("max_window_layers") or 0)
        return (FULL,) * first + (SLIDING,) * (num_layers - first)
    raise _unknown_window(window)


def _window_of(config: Config) -> int | None:
    """Return the window that some layers keep; None if it is off."""
    is_used_unless_said = config.model_type not in _WINDOW_IN_DEEP_LAYERS
    if not config.flag("use_sliding_window", default=is_used_unless_said):
        return None
    return config.optional_count("sliding_window")


def _is_idle(window: int, config: Config) -> bool:
    """Tell whether the window covers every position that the model knows."""
    positions = config.max_positions
    return positions is not None and window >= positions


def _unknown_window(window: int) -> InvalidError:
    why = (
        f"the field 'sliding_window' is {window}: only some of its layers keep a window of the tokens, and the field "
        "'layer_types' does not say which"
    )
    return unknown_architecture(why)
