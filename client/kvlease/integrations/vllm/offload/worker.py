"""Own the worker's side of vLLM's offloading: jobs become copies between the engine's tensors and the mapped pool.

A row begins with the key of its content. A store erases the key, copies, and writes the new key; a load checks the key
before and after its copy. So a row that another owner has got, whatever went wrong, is never taken for its old content.
A failed job is reported as finished, which vLLM needs, and also as failed.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvlease.integrations.vllm.offload.copies import (
    Copies,
    HostCopies,
    Move,
    PageTensor,
    RowLayout,
    Rows,
    StreamCopies,
    moves_of,
    pairs_of,
)
from kvlease.integrations.vllm.offload.pinning import Pinning

_logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class MappedPool:
    """The pool as this rank has it mapped."""

    pool: bytes
    """The identity of the memory, as jobs name it."""
    rows: Rows


@dataclass(slots=True, kw_only=True)
class Failures:
    """What went wrong since the last report."""

    jobs: set[int] = field(default_factory=set)
    wrong_rows: set[int] = field(default_factory=set)
    """Rows that carry another key than the job says."""
    loads: dict[int, set[int]] = field(default_factory=dict)
    """The engine's blocks that each failed load leaves unwritten, by job."""

    def take_report(self) -> tuple[set[int], set[int]]:
        """Return failed jobs and wrong rows, and forget them."""
        report = self.jobs, self.wrong_rows
        self.jobs, self.wrong_rows = set(), set()
        return report


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Transfer:
    """One job under way."""

    rows: Rows
    row_ids: NDArray[np.int32]
    names: bytes
    moves: list[Move]
    is_store: bool
    num_bytes: int
    started_at: float


class PoolWorker(OffloadingWorker):
    """One rank's copies. It never raises; until it is opened, every job fails."""

    def __init__(
        self, layout: RowLayout, tensors: Sequence[PageTensor], copies: Copies, *, verifies: bool
    ) -> None:
        """Remember the engine's tensors and how to copy them."""
        self._layout = layout
        self._tensors = tuple(tensors)
        self._copies = copies
        self._verifies = verifies
        self._mapped: Callable[[], MappedPool | None] = lambda: None
        self._transfers: dict[int, _Transfer] = {}
        self._results: list[TransferResult] = []
        self.failures = Failures()
        self._has_logged = False
        self._close: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        """Show life: tensors, and unfinished jobs."""
        return f"<PoolWorker {len(self._tensors)} tensors, {len(self._transfers)} jobs>"

    def open(self, mapped: Callable[[], MappedPool | None], close: Callable[[], None]) -> None:
        """Begin to use the pool; `mapped` returns the pool as it is now, or None if there is none."""
        self._mapped, self._close = mapped, close

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Begin to store; always accepts."""
        self._submit(job_id, src_spec, dst_spec, is_store=True)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Begin to load; always accepts."""
        self._submit(job_id, dst_spec, src_spec, is_store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended, including failed ones."""
        self._settle()
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended."""
        self._copies.wait(job_ids)
        self._settle()

    def shutdown(self) -> None:
        """Wait for unfinished copies, and detach."""
        self._copies.close()
        self._transfers.clear()
        self._close()

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, spec: Any, *, is_store: bool) -> None:
        try:
            transfer = self._begin(job_id, blocks, spec, is_store=is_store)
        except Exception as error:  # noqa: BLE001 - a cache that fails must not end the engine
            self._log(error)
            transfer = None
        if transfer is None:
            self._fail(job_id, blocks.block_ids.tolist(), is_store=is_store)

    def _begin(
        self, job_id: int, blocks: GPULoadStoreSpec, spec: Any, *, is_store: bool
    ) -> _Transfer | None:
        """Start a job's copies; return None if its rows are not in memory that can be copied, or carry other keys."""
        mapped = self._mapped()
        if mapped is None or mapped.pool != spec.pool or not mapped.rows.has(spec.rows):
            return None
        if not self._copies.takes(mapped.rows):
            return None
        wrong = self._wrong(mapped.rows, spec, is_store=is_store)
        if wrong.any():
            # Nothing is copied: a NaN spoils everything that is computed beside it, even if it is overwritten later.
            self.failures.wrong_rows.update(spec.rows[wrong].tolist())
            return None
        moves = moves_of(
            self._layout, blocks.block_ids, blocks.group_sizes, blocks.block_indices, len(spec.rows)
        )
        pairs = pairs_of(mapped.rows, spec.rows, self._tensors, moves)
        transfer = _Transfer(
            rows=mapped.rows,
            row_ids=spec.rows,
            names=spec.names,
            moves=moves,
            is_store=is_store,
            num_bytes=sum(len(pages) * num_bytes for pages, _, num_bytes in pairs),
            started_at=time.monotonic(),
        )
        self._transfers[job_id] = transfer
        if is_store:
            mapped.rows.blank(spec.rows)
            self._copies.store(job_id, pairs)
        else:
            self._copies.load(job_id, [(shares, pages, size) for pages, shares, size in pairs])
        return transfer

    def _wrong(self, rows: Rows, spec: Any, *, is_store: bool) -> NDArray[np.bool_]:
        if is_store or not self._verifies:
            return np.zeros(len(spec.rows), np.bool_)
        return ~rows.carrying(spec.rows, spec.names)

    def _settle(self) -> None:
        """Note the copies that have ended."""
        for job_id in self._copies.finished():
            if (transfer := self._transfers.pop(job_id, None)) is None:
                continue
            if transfer.is_store:
                transfer.rows.sign(transfer.row_ids, transfer.names)
            else:
                self._check(job_id, transfer)
            seconds = time.monotonic() - transfer.started_at
            self._results.append(TransferResult(job_id, True, transfer.num_bytes, seconds))

    def _check(self, job_id: int, transfer: _Transfer) -> None:
        """Check that the rows still carry the keys that they had when the copy began."""
        if not self._verifies:
            return
        wrong = ~transfer.rows.carrying(transfer.row_ids, transfer.names)
        if not wrong.any():
            return
        blocks = [move.blocks[wrong[move.chunks]] for move in transfer.moves]
        self.failures.jobs.add(job_id)
        self.failures.wrong_rows.update(transfer.row_ids[wrong].tolist())
        self.failures.loads[job_id] = set(np.concatenate(blocks).tolist())

    def _fail(self, job_id: int, blocks: list[int], *, is_store: bool) -> None:
        self._transfers.pop(job_id, None)
        self.failures.jobs.add(job_id)
        if not is_store:
            self.failures.loads[job_id] = set(blocks)
        self._results.append(TransferResult(job_id, True))

    def _log(self, error: Exception) -> None:
        if not self._has_logged:
            self._has_logged = True
            _logger.error(
                "Copies to or from the kvlease pool fail; the engine goes on without them.",
                exc_info=error,
                extra={"action": "copy"},
            )


def worker_of(
    kv_caches: CanonicalKVCaches, *, bytes_per_block: int, blocks_per_chunk: int, verifies: bool
) -> PoolWorker:
    """Make the worker for an engine's tensors, on the host or on a GPU."""
    layout = RowLayout.of_pages(
        [
            [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ],
        bytes_per_block=bytes_per_block,
        blocks_per_chunk=blocks_per_chunk,
    )
    tensors = [
        PageTensor(address=one.tensor.data_ptr(), block_stride_bytes=one.tensor.stride(0))
        for one in kv_caches.tensors
    ]
    device = kv_caches.tensors[0].tensor.device
    copies: Copies = HostCopies() if device.type == "cpu" else _stream_copies(device)
    return PoolWorker(layout, tensors, copies, verifies=verifies)


def _stream_copies(device: Any) -> StreamCopies:
    """Return copies that use the driver's batched call, as vLLM's own offloading does."""
    import torch  # noqa: PLC0415 - only where there is a GPU
    from vllm import _custom_ops as ops  # noqa: PLC0415

    return StreamCopies(torch, device, ops.swap_blocks_batch, Pinning(torch, device))
