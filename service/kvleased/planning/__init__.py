"""Own the arithmetic that makes a plan from a model's layers and its memory; the same before and after launch."""

from kvleased.planning.advice.remedies import plan_or_explain, remedies
from kvleased.planning.advice.settings import changed
from kvleased.planning.advice.what_if import what_if, what_ifs
from kvleased.planning.explaining.report import report
from kvleased.planning.models import model_facts
from kvleased.planning.planner import plan, specs_of

__all__ = [
    "changed",
    "model_facts",
    "plan",
    "plan_or_explain",
    "remedies",
    "report",
    "specs_of",
    "what_if",
    "what_ifs",
]
