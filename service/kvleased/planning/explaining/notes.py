"""Own what people may not expect of a plan, in a sentence each; refusals are not here."""

from collections.abc import Iterator
from dataclasses import replace

from kvlease.errors import KVLeaseError
from kvlease.plan import CachePlan, PlanInputs
from kvlease.plan_groups import why_no_prefix
from kvlease.spec import FullAttention, LayerSpec
from kvlease.units import TOKENS_MAX
from kvleased.planning.model_inputs import with_model_facts
from kvleased.planning.models import model_facts
from kvleased.planning.planner import plan as planned
from kvleased.planning.rows import PLACES_MAX, row_places
from kvleased.planning.sizing import demand_of


def notes(inputs: PlanInputs, plan: CachePlan) -> tuple[str, ...]:
    """Return what people may not expect of the plan of these inputs; settings are written name=value."""
    return (
        *_of_prefixes(inputs, plan),
        *_of_windows(plan),
        *_of_positions(inputs, plan),
        *_of_rows(inputs, plan),
    )


def ends_with_its_row(inputs: PlanInputs, plan: CachePlan) -> bool:
    """Tell whether the longest request was shortened to what a row of the block table has places for."""
    asked = with_model_facts(inputs).longest_request_tokens or TOKENS_MAX
    longest = plan.longest_request_tokens
    if not plan.groups or longest >= asked:
        return False
    specs: list[dict[LayerSpec, None]] = [{} for _ in plan.groups]
    for rank in plan.ranks:
        for layer in rank.layers:
            specs[layer.group][layer.spec] = None
    demand = demand_of(with_model_facts(inputs), longest + 1)
    return row_places([tuple(one) for one in specs], demand) > PLACES_MAX


def _of_prefixes(inputs: PlanInputs, plan: CachePlan) -> Iterator[str]:
    """Yield a note if no prefix is ever found, although prefixes were asked for."""
    if not plan.groups or not inputs.engine.prefix_caching:
        return
    if reason := _why_no_prefix(plan):
        said = f"no prefix is ever found, because {reason}"
        yield said + (
            "; prefixes would be found with state_mode=align" if _align_would(inputs) else ""
        )


def _of_windows(plan: CachePlan) -> Iterator[str]:
    """Yield a note for each group whose windows share a table with layers that keep every token."""
    for index, group in enumerate(plan.groups):
        spec = group.spec
        window = isinstance(spec, FullAttention) and (spec.window_tokens or spec.chunk_tokens)
        if window:
            yield (
                f"group {index} keeps every token, although some of its layers need only windows of {window} tokens, "
                "because layers that keep every token are in the same table"
            )


def _of_positions(inputs: PlanInputs, plan: CachePlan) -> Iterator[str]:
    """Yield a note if the longest request is beyond the model's positions."""
    positions = (
        model_facts(inputs.model_config).max_position_tokens if inputs.model_config else None
    )
    if positions and plan.longest_request_tokens > positions:
        yield (
            f"the longest request has {plan.longest_request_tokens} tokens, more than the {positions} positions of "
            "the model"
        )


def _of_rows(inputs: PlanInputs, plan: CachePlan) -> Iterator[str]:
    """Yield a note if the longest request ends where its row in the block table does."""
    if ends_with_its_row(inputs, plan):
        yield (
            f"the longest request has {plan.longest_request_tokens} tokens, because its row of the block table has at "
            f"most {PLACES_MAX} places over all groups; a larger tokens_per_block makes it longer, and "
            "longest_request_tokens shorter"
        )


def _why_no_prefix(plan: CachePlan) -> str:
    if plan.hit_alignment_tokens > plan.longest_request_tokens:
        return (
            f"a prefix that is found ends at a multiple of {plan.hit_alignment_tokens} tokens, and the longest request "
            f"has {plan.longest_request_tokens}"
        )
    return why_no_prefix(plan)


def _align_would(inputs: PlanInputs) -> bool:
    if inputs.engine.state_mode == "align":
        return False
    try:
        return not _why_no_prefix(
            planned(replace(inputs, engine=replace(inputs.engine, state_mode="align")))
        )
    except KVLeaseError:
        return False
