"""Own what is tried when a plan is refused: settings of every kind that may help, the nearest of each kind first.

This module does not know whether they help. It leaves lower tiers out, so that one that is too small does not hide what
the device needs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final, TypeAlias

from kvlease.errors import InvalidError, KVLeaseError, NeverFitsError
from kvlease.geometry import floor_div
from kvlease.layout import Layout
from kvlease.plan import CachePlan, PlanInputs
from kvleased.planning.advice.settings import changed
from kvleased.planning.planner import plan

Setting: TypeAlias = tuple[Fraction, str]
"""How far a setting is from what was asked for, and the setting, written name=value."""

_FACTORS: Final = (2, 4, 8, 16)
"""The factors by which a block or a number of ranks is changed."""
_FAR: Final = Fraction(2**53)
"""The distance of a setting that does without something."""
_RANKS_TRIED: Final = 8
_BITS_OF_KV_DTYPE: Final[Mapping[str, int]] = {
    "bfloat16": 16, "float16": 16, "float32": 32, "fp8": 8, "fp8_ds_mla": 8, "int8": 8, "int4": 4, "nvfp4": 4,
    "nvfp4_ds_mla": 4,
}  # fmt: skip
"""Ways to keep K and V that differ from each other, with the bits of an element."""
_PLAIN: Final = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Settings of one kind that may help."""

    settings: Iterable[Setting]
    """The nearest setting first."""
    wanted: int = 1
    """How many of the settings that help are worth naming."""


def proposals(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Proposal]:
    """Yield what may help after a plan of some inputs was refused; nothing if the refusal names no rule."""
    if refusal.rule is None:
        return
    seek = _BY_RULE.get(refusal.rule) or _BY_RESOURCE.get(refusal.resource or "")
    if seek is not None:
        yield from seek(inputs, refusal)


def _of_memory(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Proposal]:
    """Yield shorter requests, more memory, other blocks, smaller elements, more ranks and shorter steps."""
    yield Proposal(settings=list(_shorter_request(inputs)))
    yield Proposal(settings=list(_more_memory(inputs, refusal)))
    yield Proposal(settings=_other_blocks(inputs))
    yield Proposal(settings=[(Fraction(2), "kv_dtype=fp8")])
    ranks = inputs.parallel.tensor_ranks
    yield Proposal(
        settings=[(Fraction(factor), f"tensor_ranks={ranks * factor}") for factor in _FACTORS]
    )
    step = inputs.engine.tokens_per_step
    yield Proposal(
        settings=[
            (Fraction(factor), f"tokens_per_step={floor_div(step, factor)}") for factor in _FACTORS
        ]
    )


def _of_given_blocks(inputs: PlanInputs, _: KVLeaseError) -> Iterator[Proposal]:
    """Yield as many blocks as memory holds, as much memory as the blocks take, other blocks and smaller elements."""
    held = _planned(replace(_without_tiers(inputs), device_blocks=0, longest_request_tokens=1))
    if held is not None:
        distance = Fraction(inputs.device_blocks, held.num_blocks)
        yield Proposal(settings=[(distance, f"device_blocks={held.num_blocks}")])
    boundless = replace(
        changed(_without_tiers(inputs), "device_bytes=0"),
        device_blocks=inputs.device_blocks,
        longest_request_tokens=1,
    )
    wanted = _planned(boundless)
    if wanted is not None:
        need = max(rank.device_bytes for rank in wanted.ranks)
        distance = Fraction(need, max(1, inputs.device_bytes))
        yield Proposal(settings=[(distance, f"device_bytes={need}")])
    yield Proposal(settings=_other_blocks(inputs))
    yield Proposal(settings=[(Fraction(2), "kv_dtype=fp8")])


def _shorter_request(inputs: PlanInputs) -> Iterator[Setting]:
    """Yield the longest request that would be admitted."""
    fitted = _planned(replace(_without_tiers(inputs), fit_longest_request=True))
    if fitted is not None and inputs.longest_request_tokens:
        tokens = fitted.longest_request_tokens
        yield Fraction(inputs.longest_request_tokens, tokens), f"longest_request_tokens={tokens}"


def _more_memory(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Setting]:
    """Yield the least memory, in whole blocks, that admits the longest request; else what the refusal asks for."""
    needed = _least_pool(_without_tiers(inputs))
    if needed is None:
        if refusal.resource == "device_bytes" and refusal.need:
            yield (
                Fraction(refusal.need, max(1, inputs.device_bytes)),
                f"device_bytes={refusal.need}",
            )
        return
    if inputs.device_blocks:
        setting, asked, need = "device_blocks", inputs.device_blocks, needed.num_blocks
    else:
        need = max(rank.device_bytes for rank in needed.ranks)
        setting, asked = "device_bytes", inputs.device_bytes
    yield Fraction(need, max(1, asked)), f"{setting}={need}"


def _least_pool(inputs: PlanInputs) -> CachePlan | None:
    """Return the plan with the fewest blocks: one that can be granted, or as many as the refusal says are needed."""
    boundless = replace(changed(inputs, "device_bytes=0"), device_blocks=inputs.null_blocks + 1)
    try:
        return plan(boundless)
    except NeverFitsError as refusal:
        num_blocks = (refusal.need or 0) + inputs.null_blocks
    except InvalidError:
        return None
    return _planned(replace(boundless, device_blocks=num_blocks))


def _other_blocks(inputs: PlanInputs) -> Iterator[Setting]:
    """Yield fewer and more tokens per block."""
    tokens = inputs.tokens_per_block
    near = {tokens * factor: Fraction(factor) for factor in _FACTORS}
    near |= {
        floor_div(tokens, factor): Fraction(factor)
        for factor in reversed(_FACTORS)
        if tokens % factor == 0
    }
    near |= {
        size: max(Fraction(size, tokens), Fraction(tokens, size))
        for size in (16, 32, 64, 128, 256)
        if size != tokens
    }
    for size, distance in sorted(near.items(), key=lambda size: (size[1], size[0])):
        yield distance, f"tokens_per_block={size}"


def _of_blocks(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Proposal]:
    """Yield other blocks, and modes or layouts that suit the present blocks."""
    yield Proposal(settings=_other_blocks(inputs), wanted=3)
    yield Proposal(settings=[(Fraction(1), "state_mode=align")])
    yield from _of_layout(inputs, refusal)


def _of_layout(inputs: PlanInputs, _: KVLeaseError) -> Iterator[Proposal]:
    others = [layout for layout in Layout if layout != inputs.layout]
    yield Proposal(settings=[(Fraction(1), f"layout={layout}") for layout in others], wanted=3)


def _of_tier(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Proposal]:
    """Yield a tier as large as one slot, other blocks, and no tier at all."""
    name = str(refusal.resource)
    if refusal.need:
        larger = Fraction(refusal.need, max(1, refusal.available or 1))
        yield Proposal(settings=[(larger, f"{name}={refusal.need}")])
    yield Proposal(settings=_other_blocks(inputs))
    yield Proposal(settings=[(_FAR, f"{name}=0")])


def _of_match(_: PlanInputs, refusal: KVLeaseError) -> Iterator[Proposal]:
    sizes = {number for number in (refusal.limit, refusal.need) if number}
    settings = [(Fraction(2), f"match_tokens={size}") for size in sorted(sizes)]
    yield Proposal(settings=[(Fraction(1), "match_tokens=none"), *settings], wanted=3)


def _of_row(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Proposal]:
    """Yield as many tokens as a row covers, and other blocks."""
    most = max(1, refusal.limit or 1)
    distance = Fraction(refusal.need or most, most)
    yield Proposal(settings=[(distance, f"{refusal.resource}={most}")])
    yield Proposal(settings=_other_blocks(inputs))


def _of_context(_: PlanInputs, __: KVLeaseError) -> Iterator[Proposal]:
    yield Proposal(settings=[(Fraction(1), "context_ranks=1")])


def _of_groups(_: PlanInputs, __: KVLeaseError) -> Iterator[Proposal]:
    yield Proposal(settings=[(Fraction(1), "one_group=false")])


def _of_tensor_ranks(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Proposal]:
    """Yield numbers of ranks that can share evenly what the refused number could not."""
    asked, shared = inputs.parallel.tensor_ranks, refusal.limit or 1
    near = sorted(
        (max(Fraction(ranks, asked), Fraction(asked, ranks)), ranks)
        for ranks in range(1, 2 * asked + 1)
        if shared % ranks == 0 or ranks % shared == 0
    )
    settings = [(distance, f"tensor_ranks={ranks}") for distance, ranks in near]
    yield Proposal(settings=settings[:_RANKS_TRIED], wanted=3)


def _of_stages(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Proposal]:
    most = max(1, refusal.limit or 1)
    distance = Fraction(inputs.parallel.pipeline_ranks, most)
    yield Proposal(settings=[(distance, f"pipeline_ranks={most}")])


def _of_kv_dtype(inputs: PlanInputs, _: KVLeaseError) -> Iterator[Proposal]:
    """Yield the ways to keep K and V, those with elements of the nearest size first."""
    asked = _BITS_OF_KV_DTYPE.get(inputs.kv_dtype, 8)
    near = [
        (max(Fraction(bits, asked), Fraction(asked, bits)), f"kv_dtype={name}")
        for name, bits in _BITS_OF_KV_DTYPE.items()
    ]
    yield Proposal(settings=sorted(near, key=lambda setting: setting[0]), wanted=3)


def _of_missing_dtype(_: PlanInputs, __: KVLeaseError) -> Iterator[Proposal]:
    yield Proposal(settings=[(Fraction(1), f"kv_dtype={name}") for name in _PLAIN], wanted=3)


def _without_tiers(inputs: PlanInputs) -> PlanInputs:
    return replace(inputs, host_bytes=0, disk_bytes=0, remote_bytes=0)


def _planned(inputs: PlanInputs) -> CachePlan | None:
    """Return the plan of some inputs, if there is one."""
    try:
        return plan(inputs)
    except KVLeaseError:
        return None


_Seek: TypeAlias = Callable[[PlanInputs, KVLeaseError], Iterator[Proposal]]
_BY_RULE: Final[Mapping[str, _Seek]] = {
    "device_blocks_do_not_fit": _of_given_blocks,
    "kv_dtype_not_for_model": _of_kv_dtype,
    "more_stages_than_layers": _of_stages,
    "ranks_do_not_divide": _of_tensor_ranks,
    "row_too_long": _of_row,
}
"""The function that seeks remedies for a refusal, by the rule that was broken."""
_BY_RESOURCE: Final[Mapping[str, _Seek]] = {
    "context_ranks": _of_context,
    "device_blocks": _of_memory,
    "device_bytes": _of_memory,
    "disk_bytes": _of_tier,
    "host_bytes": _of_tier,
    "kv_dtype": _of_missing_dtype,
    "layout": _of_layout,
    "match_tokens": _of_match,
    "one_group": _of_groups,
    "remote_bytes": _of_tier,
    "tokens_per_block": _of_blocks,
}
"""The same, by the resource that was refused, for rules that are not listed above."""
