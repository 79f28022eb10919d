"""Own which preempted requests vLLM's offloading scheduler is told of: not those that load again in the same step.

A reset can preempt a request that starts a load before the step is planned. The scheduler takes all transfers of a
preempted request for stores, which it flushes before others get the blocks; if one is a load, it ends the engine.
"""

from typing import Any, TypeVar

T = TypeVar("T")


def without_loads(scheduler: Any, output: T) -> T:
    """Return the output of a step without the preempted requests that load: these have no store to be flushed."""
    preempted: set[str] = getattr(output, "preempted_req_ids", None) or set()
    storing = {one for one in preempted if not _loads(scheduler, one)}
    return output if len(storing) == len(preempted) else changed(output, preempted_req_ids=storing)


def changed(output: T, **fields: Any) -> T:
    """Return a copy of the output of a step with other fields; `copy.copy` is several times slower.

    The output itself stays as it is, because others see it, too, such as those below MultiConnector.
    """
    copy = object.__new__(type(output))
    copy.__dict__.update(output.__dict__)
    copy.__dict__.update(fields)
    return copy


def _loads(scheduler: Any, request_id: str) -> bool:
    status = scheduler._req_status.get(request_id)  # noqa: SLF001 - probed at import of the connector
    jobs = () if status is None else status.transfer_jobs
    return any(not scheduler._jobs[job].is_store for job in jobs)  # noqa: SLF001 - the same
