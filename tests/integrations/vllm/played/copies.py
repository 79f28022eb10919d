"""Own the played rank's copies between its memory and the rows of an offloading pool, each in its time or late."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvlease.integrations.vllm.fence import unpacked_keys
from kvlease.integrations.vllm.offload.reports import RankReport
from tests.integrations.vllm.played.rank import Rank
from tests.integrations.vllm.played.stamps import Rows
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

_QUICK: Final = 0.4
"""The share of copies of a device that end within the step that begins them."""


class Copy(NamedTuple):
    """A job that was begun."""

    job_id: int
    is_store: bool
    blocks: list[int]
    rows: list[int]
    keys: list[bytes]
    pool: Rows
    """The pool that was there when it was begun."""


@dataclass(slots=True)
class Results:
    """What the rank tells the scheduler after a step."""

    completed: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    wrong_rows: set[int] = field(default_factory=set)
    loaded_requests: set[str] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)
    unwritten_blocks: set[int] = field(default_factory=set)

    @property
    def report(self) -> RankReport | None:
        """The report of jobs."""
        done = OffloadingWorkerMetadata(completed_jobs=self.completed) if self.completed else None
        return RankReport.of(done, self.failed, self.wrong_rows)


class Copier:
    """The worker's half of offload mode, as vLLM and ours behave together."""

    def __init__(
        self,
        rank: Rank,
        rows: Callable[[], Rows],
        *,
        has_one_group: bool,
        device: random.Random | None,
    ) -> None:
        """Copy at once, or as late as `device` says; `rows` gives the pool as it is mapped now."""
        self.num_stores = self.num_loads = self.num_failures = 0
        self._rank = rank
        self._rows = rows
        self._has_one_group = has_one_group
        self._device = device
        self._unsubmitted: list[tuple[int, Any]] = []
        """Stores that are begun in the next step."""
        self._underway: list[Copy] = []
        self._request_of: dict[int, str] = {}
        self._results = Results()

    def before(self, meta: Any) -> None:
        """Begin the last step's stores; end those whose blocks the step overwrites."""
        flushed = meta.jobs_to_flush or set()
        for job_id in flushed & meta.store_jobs.keys():
            self._unsubmitted.append((job_id, meta.store_jobs.pop(job_id)))
        for job_id, job in self._unsubmitted:
            self._begin(job_id, job.src_spec, job.dst_spec, is_store=True)
        self._unsubmitted = []
        self._end(lambda copy: self._device is None or copy.job_id in flushed)

    def after(self, meta: Any) -> Results:
        """Begin the step's loads, and tell what has ended."""
        for job_id, job in meta.load_jobs.items():
            self._request_of[job_id] = job.req_id
            self._begin(job_id, job.dst_spec, job.src_spec, is_store=False)
        self._unsubmitted += meta.store_jobs.items()
        self._end(lambda _: self._device is None or self._device.random() < _QUICK)
        results, self._results = self._results, Results()
        results.loaded_requests = {
            self._request_of.pop(job_id)
            for job_id in results.completed
            if job_id in self._request_of
        }
        return results

    def _begin(self, job_id: int, engine: Any, pool: Any, *, is_store: bool) -> None:
        rows = self._rows()
        copy = Copy(
            job_id,
            is_store,
            [int(block) for block in engine.block_ids],
            [int(row) for row in pool.rows],
            unpacked_keys(pool.names),
            rows,
        )
        assert len(copy.blocks) == len(copy.rows) == len(copy.keys)
        is_there = pool.pool == rows.pool and all(0 <= row < len(rows) for row in copy.rows)
        if not is_there or (not is_store and self._carries_others(copy)):
            self._results.completed[job_id] = 1
            self._fail(copy)
            return
        if is_store:
            for row in copy.rows:
                rows.erase(row)
        self._underway.append(copy)

    def _end(self, is_due: Callable[[Copy], bool]) -> None:
        left: list[Copy] = []
        for copy in self._underway:
            if not is_due(copy):
                left.append(copy)
                continue
            if copy.is_store:
                self._store(copy)
            else:
                self._load(copy)
            self._results.completed[copy.job_id] = 1
        self._underway = left

    def _store(self, copy: Copy) -> None:
        self.num_stores += 1
        for block, row, key in zip(copy.blocks, copy.rows, copy.keys, strict=True):
            copy.pool.store(row, key, self._rank.memory.at(block))

    def _load(self, copy: Copy) -> None:
        self.num_loads += 1
        for block, row in zip(copy.blocks, copy.rows, strict=True):
            slots = self._rank.memory.own(block)
            slots.clear()
            slots.update(copy.pool[row].slots)
        if self._carries_others(copy):
            self._fail(copy)

    def _carries_others(self, copy: Copy) -> bool:
        """Note rows that carry other keys than a load asks for; tell whether there are any."""
        pairs = zip(copy.rows, copy.keys, strict=True)
        wrong = {row for row, key in pairs if copy.pool[row].key != key}
        self._results.wrong_rows |= wrong
        return bool(wrong)

    def _fail(self, copy: Copy) -> None:
        self.num_failures += 1
        self._results.failed.add(copy.job_id)
        if copy.is_store:
            return
        if self._has_one_group:
            self._results.unwritten_blocks |= set(copy.blocks)
        else:
            self._results.failed_requests.add(self._request_of[copy.job_id])
