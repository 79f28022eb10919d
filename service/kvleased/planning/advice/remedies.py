"""Own the remedies for a refusal: the nearest settings with which there is a plan, each tried before it is named.

`proposals` says which settings are tried. If none is enough by itself, pairs are tried: a setting that leads to another
refusal, together with one that is proposed for that refusal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Final

from kvlease.errors import InvalidError, KVLeaseError, NeverFitsError
from kvlease.geometry import floor_div
from kvlease.plan import CachePlan, PlanInputs
from kvlease.plan_report import WAY_OUT
from kvlease.units import show_bytes
from kvleased.planning.advice.proposals import Proposal, proposals
from kvleased.planning.advice.settings import changed
from kvleased.planning.planner import plan

REMEDIES_MAX: Final = 3
"""Settings, or pairs of settings, that a refusal names."""
PLANS_MAX: Final = 60
"""The most plans that are made to find remedies."""

_LAYERS_MAX: Final = 15_360
"""The most layers, over all ranks and plans, that are planned to find remedies; this limits the time."""
_LAYERS_OF_MODEL: Final = 128
"""Layers that a model is assumed to have, because its config is not read to count them."""
_PLANS_MIN: Final = 12
_STEPS_MAX: Final = 8
"""The most settings that are tried as the first of a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One or two settings with which there is a plan."""

    settings: str
    """Each written name=value, with a space between two."""
    distance: Fraction
    """By what factor they are above or below what was asked for."""


def plan_or_explain(inputs: PlanInputs) -> CachePlan:
    """Compute every number of a cache; a refusal names the nearest settings that would work.

    Raises:
        InvalidError: the inputs contradict themselves, are out of range, or describe layers that cannot share a pool.
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
    """Return up to three settings with which the refused inputs can be planned, the nearest first.

    If no setting is enough by itself, they are pairs, each written with a space between the two settings.
    """
    trials = _Trials(_plans_of(inputs))
    found = list(_singles(trials, inputs, refusal)) or list(_pairs(trials, inputs, refusal))
    found.sort(key=lambda remedy: remedy.distance)
    return tuple(dict.fromkeys(remedy.settings for remedy in found))[:REMEDIES_MAX]


class _Trials:
    """How many plans may still be tried; each try counts one off."""

    def __init__(self, left: int) -> None:
        self.left = left

    def refusal_of(self, inputs: PlanInputs, setting: str) -> KVLeaseError | None:
        """Return why there is no plan with a setting changed; None if there is a plan."""
        self.left -= 1
        try:
            plan(changed(inputs, setting))
        except KVLeaseError as refusal:
            return refusal
        return None


def _singles(trials: _Trials, inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Remedy]:
    """Yield settings that are enough by themselves: the nearest of each kind."""
    for proposal in proposals(inputs, refusal):
        yield from islice(_working(trials, inputs, proposal), proposal.wanted)


def _working(trials: _Trials, inputs: PlanInputs, proposal: Proposal) -> Iterator[Remedy]:
    for distance, setting in proposal.settings:
        if trials.left <= 0:
            return
        if trials.refusal_of(inputs, setting) is None:
            yield Remedy(settings=setting, distance=distance)


def _pairs(trials: _Trials, inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[Remedy]:
    """Yield pairs: a setting that leads to another refusal, and the nearest setting that is enough after it."""
    num_found = 0
    for distance, first in islice(_firsts(inputs, refusal), _STEPS_MAX):
        if trials.left <= 0 or num_found >= REMEDIES_MAX:
            return
        other = trials.refusal_of(inputs, first)
        if other is None or _leads_nowhere(other, refusal):
            continue
        second = min(
            _singles(trials, changed(inputs, first), other),
            key=lambda remedy: remedy.distance,
            default=None,
        )
        if second is not None:
            num_found += 1
            yield Remedy(settings=f"{first} {second.settings}", distance=distance * second.distance)


def _leads_nowhere(other: KVLeaseError, refusal: KVLeaseError) -> bool:
    """Tell whether a change leads to the same refusal again, or cannot be made to these inputs at all."""
    is_same = (other.rule, other.resource) == (refusal.rule, refusal.resource)
    return is_same or other.rule == "needs_model_config"


def _firsts(inputs: PlanInputs, refusal: KVLeaseError) -> Iterator[tuple[Fraction, str]]:
    """Yield the nearest setting of every kind, then the second nearest of every kind."""
    kinds = [list(islice(proposal.settings, 2)) for proposal in proposals(inputs, refusal)]
    for place in range(2):
        yield from (kind[place] for kind in kinds if len(kind) > place)


def _plans_of(inputs: PlanInputs) -> int:
    """Return how many plans of such inputs may be made: fewer if each takes longer."""
    ranks = inputs.parallel.tensor_ranks * inputs.parallel.pipeline_ranks
    layers = max(1, len(inputs.layers) or _LAYERS_OF_MODEL) * max(1, ranks, len(inputs.ranks))
    return min(PLANS_MAX, max(_PLANS_MIN, floor_div(_LAYERS_MAX, layers)))


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


def _said(settings: str) -> str:
    return " and ".join(_with_bytes(setting) for setting in settings.split())


def _with_bytes(setting: str) -> str:
    name, _, value = setting.partition("=")
    return f"{setting} ({show_bytes(int(value))})" if name.endswith("_bytes") else setting
