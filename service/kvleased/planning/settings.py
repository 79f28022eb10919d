"""Own the inputs of a plan as settings that people can change, each written name=value."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from kvlease.errors import InvalidError
from kvlease.plan import PlanInputs
from kvlease.units import TOKENS_MAX, checked_count, parse_bytes

_NUMBER_CHARACTERS_MAX: Final = 20
_TRUTHS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def changed(inputs: PlanInputs, change: str) -> PlanInputs:
    """Return the inputs with one setting changed, such as tokens_per_block=8 or device_bytes=80GiB.

    Memory goes in place of a number of blocks and the other way round, and is then the same for all ranks.

    Raises:
        InvalidError: there is no such setting, its value is not one, or it needs a model_config and there are layers.
    """
    name, separator, written = (part.strip() for part in change.partition("="))
    if not separator or name not in SETTINGS:
        message = (
            f"{change[:80]!r} is no setting; write name=value with one of {', '.join(SETTINGS)}"
        )
        raise InvalidError(message, resource="what_if", rule="unknown_setting")
    value = SETTINGS[name](written)
    if name in _OF_MODEL and not inputs.model_config:
        message = (
            f"{name} needs model_config, as layers that are given by hand are those of one rank and one element type; "
            "give the model's config.json in place of layers"
        )
        raise InvalidError(message, resource=name, rule="needs_model_config")
    if name in _OF_ENGINE:
        return replace(inputs, engine=replace(inputs.engine, **{name: value}))
    if name in _OF_PARALLEL:
        return replace(inputs, parallel=replace(inputs.parallel, **{name: value}))
    if name in ("device_bytes", "device_blocks"):
        return _with_memory(inputs, **{name: value})
    return replace(inputs, **{name: value})


def _with_memory(inputs: PlanInputs, device_bytes: int = 0, device_blocks: int = 0) -> PlanInputs:
    return replace(
        inputs,
        device_bytes=device_bytes,
        device_blocks=device_blocks,
        ranks=tuple(replace(rank, device_bytes=None) for rank in inputs.ranks),
    )


def _number(written: str) -> int:
    if not written.isdecimal() or len(written) > _NUMBER_CHARACTERS_MAX:
        message = f"{written[:40]!r} is not a whole number"
        raise InvalidError(message, resource="what_if", rule="not_a_number")
    return int(written)


def _tokens(written: str) -> int:
    """Read tokens, of which "auto" is as many as fit."""
    return 0 if written == "auto" else checked_count("tokens", _number(written), most=TOKENS_MAX)


def _optional(written: str) -> int | None:
    return None if written == "none" else _number(written)


def _truth(written: str) -> bool:
    if written.lower() not in _TRUTHS:
        message = f"{written[:40]!r} is neither true nor false"
        raise InvalidError(message, resource="what_if", rule="not_a_truth")
    return _TRUTHS[written.lower()]


_OF_MODEL: Final = frozenset({"kv_dtype", "tensor_ranks", "pipeline_ranks"})
_OF_PARALLEL: Final = frozenset({"tensor_ranks", "pipeline_ranks", "context_ranks"})
_OF_ENGINE: Final = frozenset({
    "tokens_per_step", "steps_in_flight", "lookahead_tokens", "encoder_tokens_max", "state_mode", "prefix_caching",
    "match_tokens", "one_group",
})  # fmt: skip

SETTINGS: Final[Mapping[str, Callable[[str], Any]]] = {
    "tokens_per_block": _number,
    "kv_dtype": str,
    "layout": str,
    "device_bytes": parse_bytes,
    "device_blocks": _number,
    "null_blocks": _number,
    "block_multiple_bytes": _number,
    "host_bytes": parse_bytes,
    "disk_bytes": parse_bytes,
    "remote_bytes": parse_bytes,
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
    "state_mode": str,
    "prefix_caching": _truth,
    "match_tokens": _optional,
    "one_group": _truth,
}
"""Every setting, with the way to read its value."""
