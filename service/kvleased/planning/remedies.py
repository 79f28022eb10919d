"""Own the way out of a refusal: the nearest settings with which there is a plan, each tried before it is named."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Final

from kvlease.errors import InvalidError, KVLeaseError, NeverFitsError
from kvlease.geometry import floor_div
from kvlease.layout import Layout
from kvlease.plan import CachePlan, PlanInputs
from kvlease.plan_report import WAY_OUT
from kvlease.units import show_bytes
from kvleased.planning.planner import plan
from kvleased.planning.settings import changed

REMEDIES_MAX: Final = 3
"""Settings that a refusal names."""

_FACTORS: Final = (2, 4, 8, 16)
"""How far a block or a number of ranks is changed at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A setting with which there is a plan."""

    setting: str
    """Written name=value."""
    distance: Fraction
    """How many times more or less than asked for it is."""


def plan_or_explain(inputs: PlanInputs) -> CachePlan:
    """Compute every number of a cache; a refusal names the nearest settings that would work.

    Raises:
        InvalidError: the inputs contradict themselves, are out of range, or their layers cannot share a pool so.
        NeverFitsError: the memory holds no block, or the longest request does not fit in it.
    """
    try:
        return plan(inputs)
    except (InvalidError, NeverFitsError) as refusal:
        settings = remedies(inputs, refusal)
        if not settings:
            raise
        raise _explained(refusal, settings) from refusal


def remedies(inputs: PlanInputs, refusal: KVLeaseError) -> tuple[str, ...]:
    """Return up to three settings with which inputs that were refused can be planned, the nearest first."""
    seek = _BY_RESOURCE.get(refusal.resource or "")
    if seek is None or refusal.rule is None:
        return ()
    found = sorted(seek(inputs, refusal), key=lambda remedy: remedy.distance)
    return tuple(dict.fromkeys(remedy.setting for remedy in found))[:REMEDIES_MAX]


def _explained(refusal: KVLeaseError, settings: tuple[str, ...]) -> KVLeaseError:
    return type(refusal)(
        f"{refusal.message}{WAY_OUT}{' or '.join(map(_said, settings))}",
        resource=refusal.resource,
        need=refusal.need,
        available=refusal.available,
        limit=refusal.limit,
        rule=refusal.rule,
        remedies=settings,
    )


def _said(setting: str) -> str:
    name, _, value = setting.partition("=")
    return f"{setting} ({show_bytes(int(value))})" if name.endswith("_bytes") else setting


def _planned(inputs: PlanInputs, setting: str) -> CachePlan | None:
    """Return the plan with a setting changed, if there is one."""
    try:
        return plan(changed(inputs, setting))
    except KVLeaseError:
        return None


def _tried(inputs: PlanInputs, settings: Iterable[tuple[Fraction, str]]) -> Iterator[Remedy]:
    """Yield the settings with which there is a plan."""
    for distance, setting in settings:
        if _planned(inputs, setting) is not None:
            yield Remedy(setting=setting, distance=distance)


def _of_memory(inputs: PlanInputs, _: KVLeaseError) -> Iterator[Remedy]:
    """Yield shorter requests, more memory, other blocks, smaller elements, more ranks and shorter steps."""
    yield from _shorter_request(inputs)
    yield from _more_memory(inputs)
    yield from islice(_other_blocks(inputs), 1)
    yield from _tried(inputs, [(Fraction(2), "kv_dtype=fp8")])
    ranks = inputs.parallel.tensor_ranks
    more_ranks = [(Fraction(factor), f"tensor_ranks={ranks * factor}") for factor in _FACTORS]
    yield from islice(_tried(inputs, more_ranks), 1)
    step = inputs.engine.tokens_per_step
    fewer = [
        (Fraction(factor), f"tokens_per_step={floor_div(step, factor)}") for factor in _FACTORS
    ]
    yield from islice(_tried(inputs, fewer), 1)


def _shorter_request(inputs: PlanInputs) -> Iterator[Remedy]:
    """Yield the longest request that would be admitted."""
    fitted = _planned(inputs, "fit_longest_request=true")
    if fitted is not None and inputs.longest_request_tokens:
        tokens = fitted.longest_request_tokens
        distance = Fraction(inputs.longest_request_tokens, tokens)
        yield from _tried(inputs, [(distance, f"longest_request_tokens={tokens}")])


def _more_memory(inputs: PlanInputs) -> Iterator[Remedy]:
    """Yield the least memory that admits the longest request, in whole blocks."""
    needed = _least_pool(inputs)
    if needed is None:
        return
    if inputs.device_blocks:
        setting, asked, need = "device_blocks", inputs.device_blocks, needed.num_blocks
    else:
        need = max(rank.device_bytes for rank in needed.ranks)
        setting, asked = "device_bytes", inputs.device_bytes
    yield from _tried(inputs, [(Fraction(need, max(1, asked)), f"{setting}={need}")])


def _least_pool(inputs: PlanInputs) -> CachePlan | None:
    """Return the plan with the fewest blocks that there can be: one, or what its refusal says that it needs."""
    try:
        return plan(changed(inputs, f"device_blocks={inputs.null_blocks + 1}"))
    except NeverFitsError as refusal:
        if refusal.resource != "device_blocks":
            return None
        num_blocks = (refusal.need or 0) + inputs.null_blocks
    except InvalidError:
        return None
    return _planned(inputs, f"device_blocks={num_blocks}")


def _other_blocks(inputs: PlanInputs) -> Iterator[Remedy]:
    """Yield fewer and more tokens per block, the nearest first."""
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
    ordered = sorted(near.items(), key=lambda size: (size[1], size[0]))
    yield from _tried(
        inputs, ((distance, f"tokens_per_block={size}") for size, distance in ordered)
    )


def _of_blocks(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Remedy]:
    """Yield other blocks, and modes or layouts that suit the blocks that there are."""
    yield from islice(_other_blocks(inputs), REMEDIES_MAX)
    yield from _tried(inputs, [(Fraction(1), "state_mode=align")])
    yield from _of_layout(inputs, refusal)


def _of_layout(inputs: PlanInputs, _: KVLeaseError) -> Iterator[Remedy]:
    others = [layout for layout in Layout if layout != inputs.layout]
    yield from _tried(inputs, ((Fraction(1), f"layout={layout}") for layout in others))


def _of_tier(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Remedy]:
    """Yield a tier as large as one slot, smaller blocks, and none at all."""
    name = str(refusal.resource)
    if refusal.need:
        larger = Fraction(refusal.need, max(1, refusal.available or 1))
        yield from _tried(inputs, [(larger, f"{name}={refusal.need}")])
    yield from islice(_other_blocks(inputs), 1)
    without = Fraction(2**53)
    yield from _tried(inputs, [(without, f"{name}=0")])


def _of_match(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Remedy]:
    sizes = {number for number in (refusal.limit, refusal.need) if number}
    settings = [(Fraction(2), f"match_tokens={size}") for size in sorted(sizes)]
    yield from _tried(inputs, [(Fraction(1), "match_tokens=none"), *settings])


def _of_context(inputs: PlanInputs, _: KVLeaseError) -> Iterator[Remedy]:
    yield from _tried(inputs, [(Fraction(1), "context_ranks=1")])


def _of_groups(inputs: PlanInputs, _: KVLeaseError) -> Iterator[Remedy]:
    yield from _tried(inputs, [(Fraction(1), "one_group=false")])


_BY_RESOURCE: Final[Mapping[str, Callable[[PlanInputs, KVLeaseError], Iterator[Remedy]]]] = {
    "device_bytes": _of_memory,
    "device_blocks": _of_memory,
    "tokens_per_block": _of_blocks,
    "layout": _of_layout,
    "host_bytes": _of_tier,
    "disk_bytes": _of_tier,
    "remote_bytes": _of_tier,
    "match_tokens": _of_match,
    "context_ranks": _of_context,
    "one_group": _of_groups,
}
"""Where the way out of a refusal is sought, by what was refused."""
