"""Own what the verbs do with plans before memory is made: plan, explain, and refuse what no cache can carry out.

The planner is imported with the first plan: a control process that was restarted does not need it to go on.
"""

from collections.abc import Sequence

from kvlease.errors import InvalidError
from kvlease.plan import CachePlan, PlanInputs
from kvlease.units import RANKS_MAX
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.verbs import shapes


def answer(request: pb.PlanRequest, device_bytes_default: int) -> pb.PlanResponse:
    """Compute a plan, and explain it if that was asked for.

    Raises:
        InvalidError: the inputs contradict themselves, or a what-if names no change.
        NeverFitsError: the memory is too small.
    """
    from kvleased.planning import report, what_ifs  # noqa: PLC0415 - see above

    inputs, found = planned(request.inputs, device_bytes_default)
    response = pb.PlanResponse(plan=found.to_proto())
    if request.report:
        response.report.CopyFrom(report(inputs, found).to_proto())
    response.what_ifs.extend(one.to_proto() for one in what_ifs(inputs, tuple(request.what_if)))
    return response


def planned(message: pb.PlanInputs, device_bytes_default: int) -> tuple[PlanInputs, CachePlan]:
    """Return the inputs of a plan, with the default budget if they name none, and the plan.

    Raises:
        InvalidError: the inputs contradict themselves.
        NeverFitsError: the memory is too small; the error names the nearest settings that would work.
    """
    from kvleased.planning import plan_or_explain  # noqa: PLC0415 - see above

    if not message.device_bytes and not message.device_blocks and not _is_given(message.ranks):
        sized = pb.PlanInputs()
        sized.CopyFrom(message)
        sized.device_bytes = device_bytes_default
        message = sized
    inputs = PlanInputs.from_proto(message)
    return inputs, plan_or_explain(inputs)


def _is_given(ranks: Sequence[pb.RankInputs]) -> bool:
    """Tell whether every rank brings its own budget."""
    return bool(ranks) and all(rank.HasField("device_bytes") for rank in ranks)


def require_servable(planned: CachePlan) -> None:
    """Refuse a valid plan that keeps nothing, that no cache can carry out, or that lacks a null block."""
    if not planned.groups:
        message = (
            "no layer of the plan keeps anything, so there is no memory to share; give at "
            "least 1 layer that does"
        )
        raise InvalidError(message, resource="layers", rule="keeps_nothing", need=1, available=0)
    if planned.blocks_per_slot != 1:
        message = (
            f"blocks_per_slot is {planned.blocks_per_slot}; slots of several blocks can be planned, but a cache has "
            "one block per slot; register it with blocks_per_slot 1, and with more tokens_per_block for larger slots"
        )
        raise InvalidError(
            message,
            resource="blocks_per_slot",
            rule="blocks_per_slot_not_supported",
            need=planned.blocks_per_slot,
            limit=1,
        )
    if len(planned.ranks) > RANKS_MAX:
        message = f"the cache has {len(planned.ranks)} ranks; register at most {RANKS_MAX} ranks as one cache"
        raise InvalidError(message, resource="ranks", need=len(planned.ranks), limit=RANKS_MAX)
    shapes.require_null_block(planned)
