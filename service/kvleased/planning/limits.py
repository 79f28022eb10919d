"""Own the limits of a plan's inputs, which are checked before anything else is done with them."""

from typing import Final

from kvlease.errors import InvalidError
from kvlease.plan import PlanInputs
from kvlease.units import BLOCKS_MAX, BYTES_MAX, TOKENS_MAX, checked_count, show_bytes

PLANNED_RANKS_MAX: Final = 1024
"""Ranks of the widest engine that can be planned; one daemon serves only the ranks of one host, at most RANKS_MAX."""

_TOKENS_PER_BLOCK_MAX: Final = 2**24
_DIGEST_CHARACTERS_MAX: Final = 256
_STATE_MODES: Final = ("none", "align", "all")


def check_inputs(inputs: PlanInputs) -> None:
    """Refuse numbers that are out of range; layers, layout and lower tiers are checked where they are read.

    Raises:
        InvalidError: a number is out of range; the message names it and both bounds.
    """
    checked_count("tokens_per_block", inputs.tokens_per_block, least=1, most=_TOKENS_PER_BLOCK_MAX)
    for name, most in (
        ("device_bytes", BYTES_MAX),
        ("device_blocks", BLOCKS_MAX),
        ("null_blocks", BLOCKS_MAX),
        ("longest_request_tokens", TOKENS_MAX),
    ):
        checked_count(name, getattr(inputs, name), most=most)
    checked_count("block_multiple_bytes", inputs.block_multiple_bytes, least=1, most=BYTES_MAX)
    for name in ("tensor_ranks", "pipeline_ranks", "context_ranks"):
        checked_count(name, getattr(inputs.parallel, name), least=1, most=PLANNED_RANKS_MAX)
    for name in ("tokens_per_step", "steps_in_flight"):
        checked_count(name, getattr(inputs.engine, name), least=1, most=TOKENS_MAX)
    for name in ("lookahead_tokens", "encoder_tokens_max"):
        checked_count(name, getattr(inputs.engine, name), most=TOKENS_MAX)
    if inputs.engine.state_mode not in _STATE_MODES:
        message = (
            f"state_mode {inputs.engine.state_mode[:40]!r} is not one of {', '.join(_STATE_MODES)}"
        )
        raise InvalidError(message, resource="state_mode", rule="unknown_state_mode")
    if len(inputs.model_digest) > _DIGEST_CHARACTERS_MAX:
        message = f"model_digest must have at most {_DIGEST_CHARACTERS_MAX} characters, not {len(inputs.model_digest)}"
        raise InvalidError(
            message,
            resource="model_digest",
            need=len(inputs.model_digest),
            limit=_DIGEST_CHARACTERS_MAX,
        )


def check_number(number: int, name: str, given_bytes: int, bytes_each: int, *, unit: str) -> None:
    """Refuse more blocks or slots than ids can count; `name` is the input that gave their bytes.

    Raises:
        InvalidError: there are more; `limit` is the bytes of the most that there may be.
    """
    if number <= BLOCKS_MAX:
        return
    limit = BLOCKS_MAX * bytes_each
    larger = "tokens_per_block" if unit == "blocks" else "blocks_per_slot"
    message = (
        f"{name} is {given_bytes} ({show_bytes(given_bytes)}), enough for {number} {unit} of {bytes_each} bytes; the "
        f"limit is {BLOCKS_MAX}, which take {limit} bytes ({show_bytes(limit)}); lower it, or raise {larger}"
    )
    raise InvalidError(message, resource=name, need=given_bytes, limit=limit)
