"""Own what vLLM 0.32 chooses for recurrent layers: the element type of their states, and if prefixes are cached."""

from collections.abc import Mapping
from typing import Any, Final

_STATES_LIKE_THE_MODEL: Final = frozenset(
    (
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2"),
        *("olmo_hybrid", "qwen3_next", "zamba2"),
    )
)
"""The model_type of models whose states have the model's element type, whatever their config says of states."""
_STATES_ALONE: Final = frozenset(("falcon_mamba", "mamba", "mamba2"))
"""The model_type of models without attention."""


def with_state_dtype(words: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a model's words and the element type that vLLM gives its states, if it does not ask the words for it."""
    if words.get("model_type") not in _STATES_LIKE_THE_MODEL:
        return dict(words)
    return {**words, "mamba_ssm_dtype": dtype}


def caches_prefixes(words: Mapping[str, Any]) -> bool:
    """Tell whether vLLM caches prefixes of a model unless it is told otherwise."""
    return words.get("model_type") not in _STATES_ALONE
