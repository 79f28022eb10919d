"""Own the arithmetic from what a model keeps and what memory there is to a plan; the same before and after launch."""

from kvleased.planning.admission import check_request, largest_request_tokens
from kvleased.planning.planner import plan

__all__ = ["check_request", "largest_request_tokens", "plan"]
