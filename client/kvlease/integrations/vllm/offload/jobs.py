"""Own the unfinished jobs and the rows they use, from the step that plans them to the last rank's report."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True)
class Job:
    """One transfer, which every rank carries out."""

    request_id: str
    rows: NDArray[np.int32]
    blocks: NDArray[np.int32]
    """The engine's blocks."""
    is_store: bool
    ranks_left: int
    is_stale: bool = False
    """Whether vLLM has forgotten the job, because its cache was reset; then vLLM does not report its end."""


class Jobs:
    """The unfinished jobs of one engine, by vLLM's ids."""

    def __init__(self, num_ranks: int) -> None:
        """Begin with no jobs; every rank reports every job once."""
        self._num_ranks = num_ranks
        self._jobs: dict[int, Job] = {}

    def plan(self, load_jobs: Mapping[int, Any], store_jobs: Mapping[int, Any]) -> None:
        """Note the jobs that a step hands to the ranks."""
        for jobs, is_store in ((load_jobs, False), (store_jobs, True)):
            for job_id, job in jobs.items():
                blocks, rows = job.src_spec, job.dst_spec
                if not is_store:
                    blocks, rows = rows, blocks
                self._jobs[job_id] = Job(
                    request_id=job.req_id,
                    rows=rows.rows,
                    blocks=blocks.block_ids,
                    is_store=is_store,
                    ranks_left=self._num_ranks,
                )

    @property
    def is_storing(self) -> bool:
        """Whether any store is unfinished."""
        return any(job.is_store for job in self._jobs.values())

    def find(self, job_ids: Iterable[int]) -> list[Job]:
        """Return those of these jobs that are unfinished."""
        return [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]

    def storing(self, request_ids: Collection[str], blocks: Collection[int]) -> list[Job]:
        """Return the unfinished stores of some requests, and those that read some of the engine's blocks."""
        return [
            job
            for job in self._jobs.values()
            if job.is_store
            and (job.request_id in request_ids or not set(job.blocks.tolist()).isdisjoint(blocks))
        ]

    def blocks_read(self) -> set[int]:
        """Return the engine's blocks that unfinished stores read."""
        return {
            block for job in self._jobs.values() if job.is_store for block in job.blocks.tolist()
        }

    def clear(self) -> None:
        """Forget all jobs: the memory of their rows is gone."""
        self._jobs.clear()

    def forget(self) -> list[Job]:
        """Mark all jobs as forgotten by vLLM, and return those that were not marked before."""
        jobs = [job for job in self._jobs.values() if not job.is_stale]
        for job in jobs:
            job.is_stale = True
        return jobs

    def report(self, completed: Mapping[int, int]) -> list[Job]:
        """Note how many ranks report each job; return the jobs that vLLM has forgotten and that have ended now."""
        ended = []
        for job_id, num_ranks in completed.items():
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.ranks_left -= num_ranks
            if job.ranks_left <= 0:
                del self._jobs[job_id]
                if job.is_stale:
                    ended.append(job)
        return ended
