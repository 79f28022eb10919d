"""Own the inputs of a plan as settings that people can change, each written name=value."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from kvlease.errors import InvalidError
from kvlease.plan import PlanInputs
from kvlease.units import parse_bytes

_WHOLE: Final = re.compile(r"-?[0-9]{1,18}")
"""A whole number that fits into what is sent."""
_BETWEEN: Final = re.compile(r"\s+(?=[a-z_]+\s*=)")
"""The space between two settings."""
_TRUTHS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def changed(inputs: PlanInputs, change: str) -> PlanInputs:
    """Return the inputs with settings changed, such as tokens_per_block=8 or "device_bytes=80GiB host_bytes=1TiB".

    New memory replaces a number of blocks, and the other way round, and is then the same for all ranks. If the inputs
    have both, each is changed by itself. The planner decides whether there is a plan with a value.

    Raises:
        InvalidError: there is no such setting, its value cannot be read, or it needs a model_config and there is none.
    """
    for setting in _BETWEEN.split(change.strip()):
        inputs = _changed(inputs, setting)
    return inputs


def _changed(inputs: PlanInputs, setting: str) -> PlanInputs:
    name, separator, written = (part.strip() for part in setting.partition("="))
    if not separator or name not in SETTINGS:
        message = (
            f"{setting[:80]!r} is not a setting; write name=value with one of {', '.join(SETTINGS)}"
        )
        raise InvalidError(message, resource="what_if", rule="unknown_setting")
    value = SETTINGS[name](name, written)
    if name in _OF_MODEL and not inputs.model_config:
        message = (
            f"{name} needs model_config, because layers that are given by hand are those of one rank and one element "
            "type; give the model's config.json instead of layers"
        )
        raise InvalidError(message, resource=name, rule="needs_model_config")
    if name in _OF_ENGINE:
        return replace(inputs, engine=replace(inputs.engine, **{name: value}))
    if name in _OF_PARALLEL:
        return replace(inputs, parallel=replace(inputs.parallel, **{name: value}))
    if name == "device_bytes":
        return _with_bytes(inputs, value)
    if name == "device_blocks" and not inputs.device_blocks:
        return replace(_with_bytes(inputs, 0), device_blocks=value)
    return replace(inputs, **{name: value})


def _with_bytes(inputs: PlanInputs, device_bytes: int) -> PlanInputs:
    """Return the inputs with the same memory for all ranks; keep a number of blocks only if memory was given, too."""
    return replace(
        inputs,
        device_bytes=device_bytes,
        device_blocks=inputs.device_blocks if inputs.device_bytes else 0,
        ranks=tuple(replace(rank, device_bytes=None) for rank in inputs.ranks),
    )


def _number(name: str, written: str) -> int:
    """Read a whole number; the planner refuses one that is out of range."""
    if not _WHOLE.fullmatch(written):
        message = f"{name} is {written[:40]!r}, which is not a whole number of up to 18 digits"
        raise InvalidError(message, resource=name, rule="not_a_number")
    return int(written)


def _bytes(name: str, written: str) -> int:
    if written.startswith("-") and _WHOLE.fullmatch(written):
        return int(written)
    try:
        return parse_bytes(written)
    except InvalidError as error:
        message = f"{name}: {error.message}"
        raise InvalidError(
            message, resource=name, rule="not_a_number_of_bytes", need=error.need, limit=error.limit
        ) from error


def _tokens(name: str, written: str) -> int:
    """Read a number of tokens; "auto" means as many as fit."""
    return 0 if written == "auto" else _number(name, written)


def _optional(name: str, written: str) -> int | None:
    return None if written == "none" else _number(name, written)


def _truth(name: str, written: str) -> bool:
    if written.lower() not in _TRUTHS:
        message = (
            f"{name} is {written[:40]!r}, which is neither true nor false; write one of "
            f"{', '.join(_TRUTHS)}"
        )
        raise InvalidError(message, resource=name, rule="not_a_truth")
    return _TRUTHS[written.lower()]


def _word(_: str, written: str) -> str:
    return written


_OF_MODEL: Final = frozenset({"kv_dtype", "tensor_ranks", "pipeline_ranks"})
_OF_PARALLEL: Final = frozenset({"tensor_ranks", "pipeline_ranks", "context_ranks"})
_OF_ENGINE: Final = frozenset({
    "tokens_per_step", "steps_in_flight", "lookahead_tokens", "encoder_tokens_max", "state_mode", "prefix_caching",
    "match_tokens", "one_group",
})  # fmt: skip

SETTINGS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "tokens_per_block": _number,
    "kv_dtype": _word,
    "layout": _word,
    "device_bytes": _bytes,
    "device_blocks": _number,
    "null_blocks": _number,
    "block_multiple_bytes": _number,
    "host_bytes": _bytes,
    "disk_bytes": _bytes,
    "remote_bytes": _bytes,
    "blocks_per_slot": _number,
    "longest_request_tokens": _tokens,
    "fit_longest_request": _truth,
    "tensor_ranks": _number,
    "pipeline_ranks": _number,
    "context_ranks": _number,
    "tokens_per_step": _number,
    "steps_in_flight": _number,
    "lookahead_tokens": _number,
    "encoder_tokens_max": _number,
    "state_mode": _word,
    "prefix_caching": _truth,
    "match_tokens": _optional,
    "one_group": _truth,
}
"""Every setting, with the function that reads its value."""
