"""Own how the daemon's planner is found: by its entry point, because the client imports nothing of the service."""

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Final, Protocol

from kvlease.errors import InvalidError
from kvlease.plan import CachePlan, PlanInputs
from kvlease.plan_report import PlanReport, WhatIf

_GROUP: Final = "kvlease.planner"


class Planner(Protocol):
    """The calls that the command line makes to the planner."""

    def plan_or_explain(self, inputs: PlanInputs) -> CachePlan:
        """Compute every number of a cache; a refusal names settings that would work."""

    def report(self, inputs: PlanInputs, plan: CachePlan) -> PlanReport:
        """Explain every number of a plan."""

    def what_ifs(self, inputs: PlanInputs, changes: Sequence[str]) -> tuple[WhatIf, ...]:
        """Compare the plan with the plan after each change."""

    def changed(self, inputs: PlanInputs, change: str) -> PlanInputs:
        """Return the inputs with one setting changed."""


def find_planner() -> Planner:
    """Return the planner of the installed daemon.

    Raises:
        InvalidError: no daemon is installed.
    """
    found = {point.name: point for point in entry_points(group=_GROUP)}
    if "planner" not in found:
        message = (
            'the planner is not installed; in a clone, install it with: pip install ".[service]"'
        )
        raise InvalidError(message, resource="planner")
    planner: Planner = found["planner"].load()
    return planner
