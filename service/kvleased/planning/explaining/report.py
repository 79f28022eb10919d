"""Own how a plan explains its numbers: each as an equation with its numbers, in the order in which they follow.

Nothing is computed here that the plan does not say. An equation that gave another number than the plan would be our own
mistake, so an assertion checks it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Final

from kvlease.plan import CachePlan, GroupPlan, PlanInputs, RankPlan
from kvlease.plan_report import Equation, PlanReport
from kvlease.spec import LayerSpec, StateSpace
from kvleased.planning.explaining.notes import ends_with_its_row, notes
from kvleased.planning.explaining.page_terms import page_term, state_term, states_term, token_term
from kvleased.planning.explaining.pool_terms import (
    block_term,
    different_ranks,
    kernel_stride_term,
    num_blocks_term,
    slot_term,
    tier_terms,
)
from kvleased.planning.explaining.request_terms import blocks_term, entries_term
from kvleased.planning.explaining.terms import (
    Term,
    common_divisor,
    common_multiple,
    floor,
    least,
    literal,
    most,
    number,
    total,
)
from kvleased.planning.model_inputs import with_model_facts

UNITS: Final[Mapping[str, str]] = {
    "blocks_per_longest_request": "blocks",
    "bytes_per_block": "bytes",
    "bytes_per_longest_request": "bytes",
    "bytes_per_page": "bytes",
    "bytes_per_slot": "bytes",
    "bytes_per_state": "bytes",
    "bytes_per_token": "bytes",
    "capacity_tokens": "tokens",
    "concurrency": "requests",
    "device_bytes": "bytes",
    "hash_block_tokens": "tokens",
    "hit_alignment_tokens": "tokens",
    "host_bytes": "bytes",
    "kernel_block_stride": "blocks",
    "kernel_blocks_per_block": "blocks",
    "longest_request_tokens": "tokens",
    "num_blocks": "blocks",
    "num_disk_slots": "slots",
    "num_remote_slots": "slots",
    "num_slots": "slots",
    "scheduler_block_tokens": "tokens",
    "slot_cell_bytes": "bytes",
    "states_per_block": "states",
    "table_blocks": "entries",
    "tensor_replicas": "ranks",
    "tokens_per_block": "tokens",
    "usable_blocks": "blocks",
}
"""Every number that is explained, with its unit."""


def report(inputs: PlanInputs, plan: CachePlan) -> PlanReport:
    """Return every number of the plan of these inputs, explained."""
    inputs = with_model_facts(inputs)
    specs = _specs_by_group(plan)
    equations = (
        *(
            equation
            for index, counts in enumerate(specs)
            for equation in _pages(index, plan.groups[index], counts)
        ),
        *_pool(plan, inputs),
        *_requests(plan, inputs, specs),
        *_memory(plan),
        *_slots(plan, inputs),
        *_units(plan, inputs),
    )
    return PlanReport(equations=tuple(_said_once(equations)), notes=notes(inputs, plan))


def _said_once(equations: Iterable[Equation]) -> Iterator[Equation]:
    """Yield the equations in order; one equation stands for all groups for which it says the same."""
    said: dict[tuple[Equation, bool], tuple[int, ...]] = {}
    for equation in equations:
        key = (replace(equation, groups=()), bool(equation.groups))
        said[key] = said.get(key, ()) + equation.groups
    for (equation, _), groups in said.items():
        yield replace(equation, groups=groups)


def _specs_by_group(plan: CachePlan) -> list[dict[LayerSpec, int]]:
    """Return the different specs of every group's layers over all ranks, with the number of layers that have each."""
    by_name = {layer.name: layer for rank, _ in different_ranks(plan) for layer in rank.layers}
    counts: list[dict[LayerSpec, int]] = [{} for _ in plan.groups]
    for index, group in enumerate(plan.groups):
        for name in group.layer_names:
            spec = by_name[name].spec
            counts[index][spec] = counts[index].get(spec, 0) + 1
    return counts


def _pages(index: int, group: GroupPlan, counts: dict[LayerSpec, int]) -> Iterator[Equation]:
    """Yield what a page of a group is made of; if its layers differ, for one layer of each spec."""
    for spec in counts:
        layer = "" if len(counts) == 1 else spec.name
        yield _says(
            "bytes_per_state", state_term(spec), spec.bytes_per_state, groups=(index,), layer=layer
        )
        if (states := states_term(spec)) is not None:
            yield _says(
                "states_per_block", states, spec.states_per_block, groups=(index,), layer=layer
            )
        yield _says(
            "bytes_per_page", page_term(spec), spec.bytes_per_page, groups=(index,), layer=layer
        )
    if len(counts) > 1:
        pages = total(
            [
                number("layers", count) * number("bytes_per_page", spec.bytes_per_page)
                for spec, count in counts.items()
            ]
        ).by("sum of pages")
        yield _says("bytes_per_page", pages, group.bytes_per_page, groups=(index,))
    tokens = [term for spec, count in counts.items() if (term := token_term(spec, count))]
    if tokens:
        of_token = tokens[0] if len(tokens) == 1 else total(tokens).by("sum over kinds of layer")
        yield _says("bytes_per_token", of_token, of_token.value, groups=(index,))


def _pool(plan: CachePlan, inputs: PlanInputs) -> Iterator[Equation]:
    """Yield what a block is made of on every kind of rank, and how many blocks there are."""
    for rank, ranks in _said_of_ranks(plan):
        yield _says(
            "bytes_per_block",
            block_term(rank, plan, inputs),
            rank.bytes_per_block,
            ranks=ranks,
        )
    yield _says("num_blocks", num_blocks_term(plan, inputs), plan.num_blocks)
    blocks = number("num_blocks", plan.num_blocks)
    usable = blocks - number("null_blocks", plan.null_blocks) if plan.null_blocks else blocks
    yield _says("usable_blocks", usable, plan.usable_blocks)


def _requests(
    plan: CachePlan, inputs: PlanInputs, specs: list[dict[LayerSpec, int]]
) -> Iterator[Equation]:
    """Yield what the longest request takes, and how many such requests fit."""
    longest = plan.longest_request_tokens
    source = "the most that fits usable_blocks"
    if longest == inputs.longest_request_tokens:
        source = "as asked for, or as the model takes"
    elif ends_with_its_row(inputs, plan):
        source = "the most that fits a row of the block table"
    yield _says("longest_request_tokens", number(source, longest), longest)
    for index, (group, counts) in enumerate(zip(plan.groups, specs, strict=True)):
        blocks = most([blocks_term(spec, inputs, longest) for spec in counts])
        yield _says(
            "blocks_per_longest_request", blocks, group.blocks_per_longest_request, groups=(index,)
        )
    for index, (group, counts) in enumerate(zip(plan.groups, specs, strict=True)):
        entries = most([entries_term(spec, inputs, longest) for spec in counts])
        yield _says("table_blocks", entries, group.table_blocks, groups=(index,))
    if plan.groups:
        yield from _capacity(plan)


def _capacity(plan: CachePlan) -> Iterator[Equation]:
    """Yield how many of the longest requests fit."""
    longest = plan.longest_request_tokens
    need = total([number("group", group.blocks_per_longest_request) for group in plan.groups])
    yield _says(
        "blocks_per_longest_request", need.by("sum over groups"), plan.blocks_per_longest_request
    )
    usable = number("usable_blocks", plan.usable_blocks)
    request = number("blocks_per_longest_request", plan.blocks_per_longest_request)
    if not plan.blocks_per_longest_request:
        request = most([literal(1), request])
    concurrency = Fraction(plan.usable_blocks, max(1, plan.blocks_per_longest_request))
    yield _says("concurrency", usable / request, concurrency)
    tokens = floor(usable * number("longest_request_tokens", longest) / request)
    yield _says("capacity_tokens", tokens, plan.capacity_tokens)


def _memory(plan: CachePlan) -> Iterator[Equation]:
    """Yield the bytes of the pool and of the longest request on every kind of rank."""
    for rank, ranks in _said_of_ranks(plan):
        block = number("bytes_per_block", rank.bytes_per_block)
        pool = number("num_blocks", plan.num_blocks) * block
        yield _says("device_bytes", pool, rank.device_bytes, ranks=ranks)
        request = number("blocks_per_longest_request", plan.blocks_per_longest_request) * block
        yield _says(
            "bytes_per_longest_request", request, rank.bytes_per_longest_request, ranks=ranks
        )


def _slots(plan: CachePlan, inputs: PlanInputs) -> Iterator[Equation]:
    """Yield what a slot is made of, and how many slots every lower tier has."""
    tiers = dict(tier_terms(plan, inputs))
    if not tiers:
        return
    for rank, ranks in _said_of_ranks(plan):
        cell = number("bytes_per_block", rank.bytes_per_block) * number(
            "blocks_per_slot", plan.blocks_per_slot
        )
        yield _says("slot_cell_bytes", cell, rank.slot_cell_bytes, ranks=ranks)
    yield _says("bytes_per_slot", slot_term(plan, inputs), plan.bytes_per_slot)
    for name, term in tiers.items():
        yield _says(name, term, getattr(plan, name))
    if plan.num_slots:
        slot = number("bytes_per_slot", plan.bytes_per_slot)
        host = number("num_slots", plan.num_slots) * slot
        yield _says("host_bytes", host, plan.host_bytes)


def _units(plan: CachePlan, inputs: PlanInputs) -> Iterator[Equation]:
    """Yield the multiples of tokens at which prefixes are named and found, and how kernels count blocks."""
    if not plan.groups:
        return
    cacheable = [group for group in plan.groups if group.is_prefix_cacheable] or list(plan.groups)
    finest = least([number("tokens_per_block", group.tokens_per_block) for group in cacheable])
    finest = finest.by("least over groups that cache prefixes")
    yield _says("tokens_per_block", finest, plan.tokens_per_block)
    scheduler = common_multiple([_ends(group, inputs) for group in plan.groups])
    if len(plan.groups) > 1:
        scheduler = scheduler.by("least common multiple over groups")
    yield _says("scheduler_block_tokens", scheduler, plan.scheduler_block_tokens)
    yield _says("hash_block_tokens", _hash_term(plan, inputs, cacheable), plan.hash_block_tokens)
    is_fine = plan.hit_alignment_tokens == plan.hash_block_tokens
    unit = "hash_block_tokens" if is_fine else "scheduler_block_tokens"
    yield _says(
        "hit_alignment_tokens", number(unit, getattr(plan, unit)), plan.hit_alignment_tokens
    )
    for index, group in enumerate(plan.groups):
        parts = number("tokens_per_block", group.tokens_per_block) / number(
            "kernel_tokens_per_block", group.kernel_tokens_per_block
        )
        yield _says(
            "kernel_blocks_per_block", parts, group.kernel_blocks_per_block, groups=(index,)
        )
        if group.kernel_block_stride != group.kernel_blocks_per_block:
            stride = kernel_stride_term(plan, index)
            yield _says("kernel_block_stride", stride, group.kernel_block_stride, groups=(index,))
    if inputs.parallel.tensor_ranks > 1:
        yield _says("tensor_replicas", _replicas_term(plan, inputs), plan.tensor_replicas)


def _hash_term(plan: CachePlan, inputs: PlanInputs, cacheable: list[GroupPlan]) -> Term:
    """Return the tokens that one key stands for: the finest that all groups allow, if anything looks for prefixes."""
    engine = inputs.engine
    has_states = any(isinstance(group.spec, StateSpace) for group in plan.groups)
    is_matched = engine.prefix_caching or engine.has_connector
    is_coarse = not is_matched or (has_states and engine.state_mode != "align")
    if len(plan.groups) == 1 or is_coarse:
        return number("scheduler_block_tokens", plan.scheduler_block_tokens)
    if engine.match_tokens is not None:
        return number("match_tokens", engine.match_tokens)
    finest = common_divisor([_ends(group, inputs) for group in cacheable])
    return finest.by("greatest common divisor over groups")


def _ends(group: GroupPlan, inputs: PlanInputs) -> Term:
    """Return the tokens that a block of a group covers over all context ranks."""
    tokens = number("tokens_per_block", group.tokens_per_block)
    context_ranks = inputs.parallel.context_ranks
    if context_ranks == 1 or not group.is_context_sharded:
        return tokens
    return tokens * number("context_ranks", context_ranks)


def _replicas_term(plan: CachePlan, inputs: PlanInputs) -> Term:
    """Return how many tensor ranks keep the same bytes of every layer."""
    ranks, context_ranks = inputs.parallel.tensor_ranks, inputs.parallel.context_ranks
    terms: dict[int, Term] = {}
    for rank, _ in different_ranks(plan):
        for layer in rank.layers:
            shards = getattr(layer.spec, "tensor_shards_max", None)
            if shards is None or (layer.spec.is_context_sharded and context_ranks > 1):
                return literal(1).by("1, as ranks keep different parts of a layer")
            share = number("tensor_ranks", ranks) / number("tensor_shards_max", shards)
            terms[shards] = most([literal(1), floor(share)])
    return common_divisor([number("tensor_ranks", ranks), *terms.values()])


def _said_of_ranks(plan: CachePlan) -> Iterator[tuple[RankPlan, tuple[int, ...]]]:
    """Yield one rank of each kind, with the numbers of all ranks of that kind; without any if all are alike."""
    found = different_ranks(plan)
    for rank, ranks in found:
        yield rank, ranks if len(found) > 1 else ()


def _says(
    name: str,
    term: Term,
    value: Fraction | int,
    *,
    groups: tuple[int, ...] = (),
    ranks: tuple[int, ...] = (),
    layer: str = "",
) -> Equation:
    """Return an equation, after a check that it gives the plan's number."""
    assert term.value == value, f"{name}: {term.arithmetic} is not {value}"
    return Equation(
        name=name,
        groups=groups,
        ranks=ranks,
        layer=layer,
        formula=term.formula,
        arithmetic=term.arithmetic,
        value=term.value.numerator,
        value_divisor=term.value.denominator,
        unit=UNITS[name],
    )
