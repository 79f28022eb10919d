"""Own the translation between the golden vectors' words and the reference engine's objects; for .venv-vllm only."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from vllm.v1 import kv_cache_interface as specs_of
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import KVQuantMode, SparseCacheRole

_CLASS_OF_TYPE = {
    "full_attention": "FullAttentionSpec",
    "sliding_window": "SlidingWindowSpec",
    "chunked_local_attention": "ChunkedLocalAttentionSpec",
    "mla_attention": "MLAAttentionSpec",
    "sliding_window_mla": "SlidingWindowMLASpec",
    "mamba": "MambaSpec",
    "cross_attention": "CrossAttentionSpec",
    "encoder_only_attention": "EncoderOnlyAttentionSpec",
    "sink_full_attention": "SinkFullAttentionSpec",
    "rswa": "RSWASpec",
    "circular_buffer": "CircularBufferSpec",
    "hidden_state": "HiddenStateCacheSpec",
}
TYPE_OF_CLASS = {name: word for word, name in _CLASS_OF_TYPE.items()}

_CLASSES = (
    ("To serve at least one request", "NOT_ENOUGH_MEMORY"),
    ("No available memory", "NO_AVAILABLE_MEMORY"),
    ("Cannot auto-fit", "AUTO_FIT_FAILED"),
    ("mixed page sizes", "LAYOUT_CANNOT_EXPRESS_MIXED_PAGES"),
    ("cannot pad pages", "LAYOUT_CANNOT_PAD_PAGES"),
    ("block_stride_alignment must be positive", "BAD_BLOCK_STRIDE_ALIGNMENT"),
    ("same window size", "WINDOW_SIZE_CONFLICT"),
    ("DCP not support sliding window", "DCP_SLIDING_WINDOW"),
    ("specs for the same layer are different", "LAYER_SPEC_DIFFERS_ACROSS_WORKERS"),
    ("Invalid prefix_match_unit", "INVALID_PREFIX_MATCH_UNIT"),
    ("Failed to promote", "PROMOTION_FAILED"),
    ("Page padding requires", "PADDED_PAGE_NON_COMPACT_LAYOUT"),
    ("do not support kernel block splitting", "PADDED_PAGE_SPLIT"),
    ("must divide KV cache block size", "KERNEL_BLOCK_DOES_NOT_DIVIDE"),
    ("as dense, unpadded pages", "PADDED_OR_PACKED_BLOCK_NOT_SPLITTABLE"),
    ("must be merged", "SPECS_NOT_MERGEABLE"),
    ("in the same KV cache group must", "SPECS_NOT_MERGEABLE"),
    ("should be merged in", "SPECS_NOT_MERGEABLE"),
    ("must share the same rswa_window", "SPECS_NOT_MERGEABLE"),
    ("page size", "PAGE_SIZE_NOT_UNIFIABLE"),
    ("register", "UNREGISTERED_SPEC"),
)
"""Parts of error messages, and the classes by which vectors name the errors."""


def spec_of(words: dict[str, Any]) -> Any:
    """Return the reference's spec of a layer."""
    fields = {word: _value(word, value) for word, value in words.items() if word != "type"}
    if words["type"] == "mamba":
        fields["dtypes"] = tuple(getattr(torch, dtype) for dtype in words["dtypes"])
        fields["shapes"] = tuple(tuple(shape) for shape in words["shapes"])
    return getattr(specs_of, _CLASS_OF_TYPE[words["type"]])(**fields)


def _value(word: str, value: Any) -> Any:
    if word == "dtype":
        return getattr(torch, value)
    if word == "kv_quant_mode":
        return KVQuantMode[value]
    if word == "cache_role":
        return SparseCacheRole(value)
    if isinstance(value, dict):
        return MultipleOf(value["multiple_of"])
    if word == "tokens_per_state" and isinstance(value, str):
        return Fraction(value)
    return value


def spec_words(spec: Any) -> dict[str, Any]:
    """Return a spec in the vectors' words, without words that only repeat others."""
    words: dict[str, Any] = {"type": TYPE_OF_CLASS[type(spec).__name__]}
    for name in spec.__dataclass_fields__:
        value = getattr(spec, name)
        if name in ("mamba_type", "num_heads", "alignment") or (
            name == "tokens_per_state" and words["type"] == "mamba"
        ):
            continue
        words[name] = plain(value)
    return words


def plain(value: Any) -> Any:
    """Return one of the reference's values as JSON has it."""
    if isinstance(value, tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else str(value)
    found = next((say for kind, say in _SAYINGS.items() if isinstance(value, kind)), None)
    return found(value) if found else value


_SAYINGS: dict[type, Callable[[Any], Any]] = {
    torch.dtype: lambda dtype: str(dtype).removeprefix("torch."),
    KVQuantMode: lambda mode: mode.name,
    SparseCacheRole: lambda role: role.value,
    MultipleOf: lambda multiple: {"multiple_of": multiple.base},
}


def error_words(error: Exception) -> dict[str, Any]:
    """Return an error by its stable class; an error without one was no intended refusal."""
    kind, message = type(error).__name__, str(error)
    found = next((name for text, name in _CLASSES if text.lower() in message.lower()), None)
    words: dict[str, Any] = {"type": kind, "class": found or f"UNHANDLED_{kind.upper()}"}
    if found == "NOT_ENOUGH_MEMORY":
        _, _, rest = message.partition("estimated maximum model length is ")
        words["estimated_max_model_len"] = int(rest.split(".")[0]) if rest else 0
    words["message"] = message[:300]
    return words
