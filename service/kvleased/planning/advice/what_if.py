"""Own what a changed setting would change: always a fresh plan, compared with the plan as asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvlease.errors import InvalidError, KVLeaseError
from kvlease.geometry import floor_div
from kvlease.plan import PlanInputs
from kvlease.plan_report import PlanOutcome, WhatIf
from kvlease.units import TOKENS_MAX, checked_count
from kvleased.planning.advice.settings import changed
from kvleased.planning.model_inputs import with_model_facts
from kvleased.planning.planner import plan

ALL: Final = "all"
"""The change that stands for all usual changes."""
CHANGES_MAX: Final = 32
"""The most changes that are compared in one call."""

_PLAIN_TYPES: Final = ("", "auto", "float32", "float16", "bfloat16")


def what_if(inputs: PlanInputs, change: str) -> WhatIf:
    """Return what one changed setting, written name=value, would change.

    Raises:
        InvalidError: there is no such setting, or its value cannot be read.
    """
    return _compared(inputs, change, _outcome(inputs))


def what_ifs(inputs: PlanInputs, changes: Sequence[str]) -> tuple[WhatIf, ...]:
    """Return what each change would change by itself; "all" stands for the usual changes.

    Raises:
        InvalidError: there is no such setting, a value cannot be read, or there are too many changes.
    """
    checked_count("what_if", len(changes), most=CHANGES_MAX)
    if not changes:
        return ()
    before = _outcome(inputs)
    wanted: dict[str, None] = {}
    for change in changes:
        wanted.update(dict.fromkeys(usual_changes(inputs) if change == ALL else (change,)))
    return tuple(_compared(inputs, change, before) for change in wanted)


def usual_changes(inputs: PlanInputs) -> Iterator[str]:
    """Yield the changes that people ask for first: blocks, element type, ranks, memory, a host pool."""
    if inputs.tokens_per_block > 1:
        yield f"tokens_per_block={floor_div(inputs.tokens_per_block, 2)}"
    yield f"tokens_per_block={2 * inputs.tokens_per_block}"
    if inputs.model_config:
        if inputs.kv_dtype in _PLAIN_TYPES:
            yield "kv_dtype=fp8"
        yield f"tensor_ranks={2 * inputs.parallel.tensor_ranks}"
    if inputs.device_blocks:
        yield f"device_blocks={2 * inputs.device_blocks}"
    elif inputs.device_bytes:
        yield f"device_bytes={2 * inputs.device_bytes}"
    memory = inputs.host_bytes or inputs.device_bytes
    if memory:
        yield f"host_bytes={2 * memory}"


def _compared(inputs: PlanInputs, change: str, before: PlanOutcome) -> WhatIf:
    try:
        after = _outcome(changed(inputs, change))
    except InvalidError as error:
        if error.rule != "needs_model_config":
            raise
        after = PlanOutcome(refusal=_said(error))
    return WhatIf(change=change, before=before, after=after)


def _outcome(inputs: PlanInputs) -> PlanOutcome:
    """Return the numbers of a fresh plan, or the reason why there is none."""
    try:
        made = plan(inputs)
        largest = made.longest_request_tokens
        if largest == with_model_facts(inputs).longest_request_tokens:
            # The longest request was not shortened, so a longer one may fit.
            unbound = replace(inputs, longest_request_tokens=TOKENS_MAX, fit_longest_request=True)
            largest = plan(unbound).longest_request_tokens
    except KVLeaseError as error:
        return PlanOutcome(refusal=_said(error))
    return PlanOutcome(
        bytes_per_block=max(rank.bytes_per_block for rank in made.ranks),
        num_blocks=made.num_blocks,
        usable_blocks=made.usable_blocks,
        blocks_per_longest_request=made.blocks_per_longest_request,
        longest_request_tokens=made.longest_request_tokens,
        largest_request_tokens=largest,
        capacity_tokens=made.capacity_tokens,
        num_slots=made.num_slots,
        bytes_per_slot=made.bytes_per_slot,
        num_disk_slots=made.num_disk_slots,
        num_remote_slots=made.num_remote_slots,
    )


def _said(error: KVLeaseError) -> str:
    return f"{error.code}: {error.message}"
