"""Own what a rank reports of its jobs beyond vLLM's own report: failed jobs, and rows that carry another key."""

from dataclasses import dataclass, field
from typing import Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata


@dataclass
class RankReport(OffloadingWorkerMetadata):
    """The report of one rank, or of several ranks together, on a step."""

    failed_jobs: set[int] = field(default_factory=set)
    wrong_rows: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        report: OffloadingWorkerMetadata | None,
        failed_jobs: set[int],
        wrong_rows: set[int],
    ) -> Self | None:
        """Add a rank's failures to vLLM's report; None if there is nothing to report."""
        if report is None and not failed_jobs and not wrong_rows:
            return None
        base = report or OffloadingWorkerMetadata()
        return cls(
            completed_jobs=base.completed_jobs,
            transfer_stats=base.transfer_stats,
            failed_jobs=failed_jobs,
            wrong_rows=wrong_rows,
        )

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both reports joined."""
        joined = super().aggregate(other)
        assert isinstance(joined, OffloadingWorkerMetadata)
        failed_jobs, wrong_rows = set(self.failed_jobs), set(self.wrong_rows)
        if isinstance(other, RankReport):
            failed_jobs |= other.failed_jobs
            wrong_rows |= other.wrong_rows
        return RankReport(
            completed_jobs=joined.completed_jobs,
            transfer_stats=joined.transfer_stats,
            failed_jobs=failed_jobs,
            wrong_rows=wrong_rows,
        )
