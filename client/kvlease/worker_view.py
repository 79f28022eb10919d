"""Own what a worker knows of itself, blocking or not: who it is, what it mapped and what it holds."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlease._bound import Bound
from kvlease._checks import check_deadline, check_keys
from kvlease._session import Session
from kvlease.cuda import DeviceMemory
from kvlease.errors import InvalidError
from kvlease.keys import BlockKeys
from kvlease.memory import Identity as MemoryIdentity
from kvlease.plan import CachePlan
from kvlease.tables import RowTable


class WorkerView(Bound, ABC):
    """What a worker knows of itself."""

    def __init__(self, session: Session) -> None:
        """Look at an attached session."""
        self._session = session

    def __repr__(self) -> str:
        """Show life: who it is and how many leases it holds."""
        session = self._session
        return f"<{type(self).__name__} {session.worker_id} of {session.request.cache!r}, {len(session.grants)} leases>"

    @property
    def worker_id(self) -> int:
        """The attachment; changes when the daemon could not resume it."""
        return self._session.worker_id

    @property
    def epoch(self) -> int:
        """The daemon's life that this worker is attached to."""
        return self._session.link.epoch

    @property
    def deadline_seconds(self) -> float:
        """Seconds after which its calls end; setting it counts from the next call on."""
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
        """The device region, writable; None where it is on a GPU, or the transport hands over no memory."""
        memory = self._session.memory
        if memory is not None and memory.device is not None:
            self._session.looked_at = memory
        return None if memory is None else memory.device

    @property
    def gpu(self) -> DeviceMemory | None:
        """The device region where it is memory of a GPU, which `kvlease.views` and torch take as it is."""
        memory = self._session.memory
        if memory is not None and memory.gpu is not None:
            self._session.looked_at = memory
        return None if memory is None else memory.gpu

    @property
    def tables(self) -> RowTable:
        """The block table.

        Raises:
            InvalidError: rule no_memory: the transport hands over no memory, or the worker was closed.
        """
        memory = self._session.memory
        tables = None if memory is None else memory.tables
        if tables is None:
            message = (
                "this worker has no block table: it was closed, or it calls over REST or gRPC, which hand over no "
                "memory; give the address of the local socket, unix:///…/kvlease.sock"
            )
            raise InvalidError(message, resource="tables", rule="no_memory")
        return tables

    @property
    def memory_generation(self) -> int:
        """Grows when `device`, `gpu` and `tables` became other memory: then views of the old must be made anew.

        Until `device` or `gpu` was read again, hits are refused and nothing is committed: rule other_memory.
        """
        return self._session.memory_generation

    @property
    def memory_identity(self) -> MemoryIdentity:
        """Says which memory `device` and `tables` are: two workers with the same share it; () where there is none."""
        memory = self._session.memory
        return () if memory is None else memory.identity

    @property
    def death_proof(self) -> str:
        """How the daemon will learn of this process's death: "pidfd" or "none"."""
        return self._session.death_proof

    @property
    def num_leases(self) -> int:
        """The leases that this worker holds."""
        return len(self._session.grants)

    def absent(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell without a call of each 32-byte key of this tenant whether surely no tier of the node has its block.

        `keys` are single ones, not packed as other calls take them: there is an answer for each.

        False says nothing: the block may be cached, the daemon may be away, or the worker attached without key counts,
        over another transport than the local socket, or to a cache with a remote store. What anybody commits is absent
        no more from then on. The daemon does not hear of the question, so no metric, ghost cache or trace knows of it.

        Raises:
            InvalidError: something else than a sequence of 32-byte keys, with and without key counts.
        """
        check_keys(keys)
        session = self._session
        counts = session.key_counts
        nothing = [False] * len(keys)
        if counts is None or session.link.is_forked or (found := counts.absent(keys)) == nothing:
            return nothing
        # Only now, so that it was being written to when it was read.
        return found if self._is_written_to else nothing

    @property
    @abstractmethod
    def _is_written_to(self) -> bool:
        """Whether the process that writes the key counts lives, as far as the connection to it knows."""
