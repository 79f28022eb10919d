"""Own what every worker, blocking or not, knows of itself: its identity, its mapped memory and its leases."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlease._bound import Bound
from kvlease._calling.session import Session
from kvlease._checks import check_deadline, check_keys
from kvlease.errors import InvalidError
from kvlease.keys import BlockKeys
from kvlease.memory.cuda import DeviceMemory
from kvlease.memory.mapped import Identity as MemoryIdentity
from kvlease.plan import CachePlan
from kvlease.tables import RowTable


class WorkerView(Bound, ABC):
    """What a worker knows of itself."""

    def __init__(self, session: Session) -> None:
        """Show an attached session."""
        self._session = session

    def __repr__(self) -> str:
        """Show life: who it is and how many leases it holds."""
        session = self._session
        return f"<{type(self).__name__} {session.worker_id} of {session.request.cache!r}, {len(session.grants)} leases>"

    @property
    def worker_id(self) -> int:
        """The id of the attachment; it changes if a restarted daemon could not resume the worker."""
        return self._session.worker_id

    @property
    def epoch(self) -> int:
        """The daemon's life that this worker is attached to."""
        return self._session.link.epoch

    @property
    def deadline_seconds(self) -> float:
        """Seconds after which its calls end; a new value applies from the next call on."""
        return self._session.link.deadline_seconds

    @deadline_seconds.setter
    def deadline_seconds(self, seconds: float) -> None:
        check_deadline(seconds)
        self._session.link.deadline_seconds = seconds

    @property
    def plan(self) -> CachePlan:
        """Every number of the cache."""
        return self._session.plan

    @property
    def keys(self) -> BlockKeys:
        """The names of blocks for this worker's tenant."""
        return self._session.keys

    @property
    def device(self) -> NDArray[np.uint8] | None:
        """The device region, writable; None if it is on a GPU, or if the transport hands over no memory.

        Raises:
            InvalidError: this process is a forked child, which has no part of the memory.
        """
        self._session.link.check_process()
        memory = self._session.memory
        if memory is not None and memory.device is not None:
            self._session.looked_at = memory
        return None if memory is None else memory.device

    @property
    def gpu(self) -> DeviceMemory | None:
        """The device region if it is memory of a GPU; `kvlease.views` and torch take it as it is.

        Raises:
            InvalidError: this process is a forked child, which has no part of the memory.
        """
        self._session.link.check_process()
        memory = self._session.memory
        if memory is not None and memory.gpu is not None:
            self._session.looked_at = memory
        return None if memory is None else memory.gpu

    @property
    def tables(self) -> RowTable:
        """The block table.

        Raises:
            InvalidError: rule no_memory: the transport hands over no memory, or the worker was closed; or this process
                is a forked child, which has no part of the memory.
        """
        self._session.link.check_process()
        memory = self._session.memory
        tables = None if memory is None else memory.tables
        if tables is None:
            message = (
                "this worker has no block table: it was closed, or it calls over REST or gRPC, which do not hand "
                "over memory; use the address of the local socket, unix:///…/kvlease.sock"
            )
            raise InvalidError(message, resource="tables", rule="no_memory")
        return tables

    @property
    def memory_generation(self) -> int:
        """Grows when `device`, `gpu` and `tables` have become other memory; then make all views anew.

        A worker that had read `device` or `gpu` gets no hits and commits nothing until it reads one of them again (rule
        other_memory).
        """
        return self._session.memory_generation

    @property
    def memory_identity(self) -> MemoryIdentity:
        """Identifies the memory of `device` and `tables`: workers with equal values share it; () if there was none."""
        memory = self._session.memory
        return () if memory is None else memory.identity

    @property
    def death_proof(self) -> str:
        """How the daemon will learn of this process's death: "pidfd", or "none" if it cannot."""
        return self._session.death_proof

    @property
    def num_leases(self) -> int:
        """How many leases this worker holds."""
        return len(self._session.grants)

    def absent(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell for each key of this tenant, without a call, whether surely no tier of the node has its block.

        `keys` is a sequence of 32-byte keys, not packed as in other calls; there is one answer for each.

        False says nothing: the block may be cached, the daemon may be away, or the worker may have attached without key
        counts, not over the local socket, or to a cache with a remote store. Once anybody commits a key, it is absent
        no more. The daemon does not hear of the question, so no metric, ghost cache or trace counts it.

        Raises:
            InvalidError: `keys` is not a sequence of 32-byte keys; this is checked without key counts, too.
        """
        check_keys(keys)
        session = self._session
        counts = session.key_counts
        nothing = [False] * len(keys)
        if counts is None or session.link.is_forked or (found := counts.absent(keys)) == nothing:
            return nothing
        # Asked after the reading, so that the writer surely lived while the counts were read.
        return found if self._is_written_to else nothing

    @property
    @abstractmethod
    def _is_written_to(self) -> bool:
        """Whether the process that writes the key counts lives, as far as the connection to that process shows."""
