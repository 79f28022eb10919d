"""Own what vLLM leaves undone when it preempts a request: what its offloading scheduler is told, and blocks' names.

A reset can preempt a request that starts a load before the step is planned. The scheduler takes all transfers of a
preempted request for stores, which it flushes before others get the blocks; if one is a load, it ends the engine.

With scheduling by priority, a request can be preempted in the step that gave it blocks. vLLM leaves these their names,
under which other requests would find what nobody computed, and store what they compute from it.
"""

from typing import Any, TypeVar

from vllm.v1.core.block_pool import BlockPool

from kvlease.integrations.vllm.fills import Fills, end_step

T = TypeVar("T")


class NotingPool(BlockPool):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """vLLM's pool, which notes what gets its name in a step; a pool that nothing else observes is given this class."""

    fills: Fills

    def cache_full_blocks(
        self, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, **more: Any
    ) -> None:
        """Cache as vLLM does, and note which blocks the step is to fill; nothing, if a failed load spoilt it."""
        if request.request_id in self.fills.spoilt:
            return
        nameless = [one for one in blocks[num_cached_blocks:num_full_blocks] if not one.block_hash]
        super().cache_full_blocks(
            request=request,
            blocks=blocks,
            num_cached_blocks=num_cached_blocks,
            num_full_blocks=num_full_blocks,
            **more,
        )
        for block in nameless:
            self.fills.note(request.request_id, block, blocks)


def observe(pool: BlockPool) -> None:
    """Let a pool note what its steps fill, unless another connector observes it already, as ours all do."""
    if type(pool) is BlockPool:
        pool.__class__ = NotingPool
        pool.fills = Fills()


def take_names_away(pool: Any, output: Any) -> None:
    """Take the names of blocks away that requests were to fill which lost their places in the step."""
    if isinstance(pool, NotingPool):
        end_step(pool, output)


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
