"""Own where `kvlease plan` reads a model from: a config.json, a list of layers, or the local Hugging Face cache."""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvlease._checks import shown
from kvlease.errors import InvalidError
from kvlease.spec import LayerSpec, spec_from_fields
from kvlease.units import TOKENS_MAX, checked_count

AUTO: Final = "auto"
"""The value of --longest-request for as many tokens as the model takes and the memory holds."""

_DIGITS_MAX: Final = 18
_FILE_BYTES_MAX: Final = 16 << 20
"""Bytes of the largest file that is read: a model's weights, named by mistake, would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is planned for: a model, or layers given by hand."""

    model_config: str = ""
    layers: tuple[LayerSpec, ...] = ()


def read_source(model: str, specs: str) -> Source:
    """Return what is planned for.

    Raises:
        InvalidError: neither or both are given, or what is given cannot be read.
    """
    if bool(model) == bool(specs):
        message = (
            "give either --model or --specs, but not both"
            if model
            else "give --model, such as a config.json, or a list of layers as --specs"
        )
        raise InvalidError(message, resource="model")
    if model:
        return Source(model_config=_read(config_path(model)))
    return Source(layers=_layers(_read(Path(specs)), specs))


def longest_request(written: str) -> int:
    """Return the tokens of the longest request; 0, for "auto", leaves them to the planner.

    Raises:
        InvalidError: it is neither a number nor auto.
    """
    if written == AUTO:
        return 0
    if not is_number(written):
        message = f"--longest-request is {written[:40]!r}; write a number of tokens, or {AUTO}"
        raise InvalidError(message, resource="longest_request_tokens")
    return checked_count("longest_request_tokens", int(written), most=TOKENS_MAX)


def is_number(written: str) -> bool:
    """Tell whether a text is a whole number, with no more digits than any number of tokens or bytes has."""
    return written.isascii() and written.isdecimal() and len(written) <= _DIGITS_MAX


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of JSON in a model's file.

    Raises:
        InvalidError: it cannot be read, or has no object of JSON.
    """
    try:
        found = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"{path} is not JSON: {error}", resource="model") from error
    if not isinstance(found, dict):
        raise InvalidError(f"{path} must be a JSON object, not {shown(found)}", resource="model")
    return found


def config_path(model: str) -> Path:
    """Return the path of the model's config.json: a file, a file in a directory, or a file in the local cache.

    Raises:
        InvalidError: there is none, or it cannot be looked for.
    """
    path = Path(model)
    try:
        if path.is_dir():
            return path / "config.json"
        if path.exists():
            return path
    except OSError as error:
        raise InvalidError(f"cannot read {model}: {error.strerror}", resource="model") from error
    cached = _cached_path(model)
    if cached is None:
        message = (
            f"cannot read {model}: there is no such file or directory, and no model of that name in the local "
            "Hugging Face cache; nothing is downloaded"
        )
        raise InvalidError(message, resource="model")
    return cached


def _cached_path(name: str) -> Path | None:
    """Return the path of a model's config in the local Hugging Face cache, or None."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        found = hub.try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):
        # Not installed, or not a name that a model could have.
        return None
    return Path(found) if isinstance(found, str) else None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1)
        if len(text) > _FILE_BYTES_MAX:
            message = (
                f"{path} has more than {_FILE_BYTES_MAX} bytes, so it does not describe a model; name "
                "a config.json, or the directory that has one"
            )
            raise InvalidError(message, resource="model", limit=_FILE_BYTES_MAX)
        return text.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidError(f"cannot read {path}: {reason}", resource="model") from error


def _layers(text: str, path: str) -> tuple[LayerSpec, ...]:
    """Return the layers of a JSON list, each with its kind and fields."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"{path} is not JSON: {error}"
        raise InvalidError(message, resource="specs") from error
    if not isinstance(found, list):
        message = f"{path} must be a JSON list of layers, such as {_EXAMPLE}; {_SEE}"
        raise InvalidError(message, resource="specs", rule="specs_not_a_list")
    if not found:
        message = f"{path}: the file lists no layers; list them, such as {_EXAMPLE}; {_SEE}"
        raise InvalidError(message, resource="specs", rule="specs_without_layers")
    for index, layer in enumerate(found):
        if not isinstance(layer, dict):
            message = (
                f"layers[{index}] of {path} is {shown(layer)}; a layer must be a JSON object, as in "
                f"{_EXAMPLE}; {_SEE}"
            )
            raise InvalidError(message, resource=f"layers[{index}]", rule="specs_not_a_list")
    return tuple(spec_from_fields(layer, f"layers[{index}]") for index, layer in enumerate(found))


_SEE: Final = "docs/specs.md says which fields a layer has"
_EXAMPLE: Final = (
    '[{"kind": "full_attention", "name": "0", "num_kv_heads": 8, "head_size": 128, '
    '"dtype": "bfloat16"}]'
)
