"""Kill the simulated control process at any line of the core, in the middle of a command, and start it anew."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvlease.errors import KVLeaseError
from kvlease.ids import Epoch, LeaseId, WorkerId
from kvleased.core import Cache, commands
from kvleased.core.effects import Outcome
from tests.laws import sharing
from tests.laws.holders import read_row, remember_places

if TYPE_CHECKING:
    from tests.laws.world import World


@dataclass(frozen=True, slots=True)
class Crash:
    """Where the control process dies: at the n-th line that it reaches in a module, in a function, or anywhere."""

    line: int
    module: str = ""
    """The file in the core, without its ending; "" means any."""
    function: str = ""
    """Only lines of functions with this name count; if none is reached, the process does not die."""
    caller: str = ""
    """Only calls from a function with this name count; "" means any."""

    def is_in(self, frame: FrameType) -> bool:
        """Tell whether the lines of a frame count."""
        if self.function not in ("", frame.f_code.co_name):
            return False
        if f"/kvleased/core/{self.module}" not in frame.f_code.co_filename:
            return False
        return frame.f_back is not None and self.caller in ("", frame.f_back.f_code.co_name)


class InterruptedWorldError(Exception):
    """The control process was killed and restarted, so what was being done came to nothing."""


class _KilledError(BaseException):
    """Ends the command; nothing in the core catches it."""


def handle(world: "World", command: commands.Command, crash: Crash) -> Outcome:
    """Give a command to the core, which dies in the middle of it or before its answer is out; then start it anew.

    If the function to die in is not reached, the command is carried out, and the crash is still ahead.

    Raises:
        InterruptedWorldError: The control process died, and a new one runs.
        KVLeaseError: The command was refused, and the crash is still ahead.
    """
    certain = _certain(world, command)
    try:
        outcome = _traced(world, command, crash)
    except _KilledError:
        pass
    except KVLeaseError:
        if crash.function:
            world.crash = crash
            raise
    else:
        if crash.function:
            world.crash = crash
            return outcome
    world.faults["crash"] += 1
    world.ended.clear()
    restart(world, certain)
    # What the interrupted command was doing to a lease may have happened.
    for worker in world.workers.values():
        for held in worker.leases.values():
            read_row(world, held)
    raise InterruptedWorldError


def _traced(world: "World", command: commands.Command, crash: Crash) -> Outcome:
    left = crash.line

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        del argument
        if event == "call":
            return trace if crash.is_in(frame) else None
        if event == "line":
            left -= 1
            if left < 0:
                raise _KilledError
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        outcome = world.cache.handle(command, world.now)
        world.cache.settle()
    finally:
        sys.settrace(previous)
    return outcome


Known = tuple[WorkerId, LeaseId]
"""A worker's part in a lease."""


def restart(world: "World", certain: Iterable[Known] | None = None) -> None:
    """Let the supervisor start the control process anew over the same records; the mover is new as well.

    Leases that are certain must not be lost: those that were there, except those that a command was about to end.
    """
    kept = world.known_ids() if certain is None else certain
    world.jobs.clear()
    world.stores.probes.clear()
    world.calls.clear()
    world.pins.clear()
    world.unsure.clear()
    world.about_to_move = None
    world.epoch = Epoch(world.epoch + world.rng.randint(1, 3))
    alive = {worker.worker_id: worker.tenant for worker in world.workers.values()}
    world.dead_unknown.clear()
    world.cache = remember_places(
        Cache.recovered(
            world.shape,
            world.records,
            world.epoch,
            alive,
            world.now,
            places={one: worker.place for one, worker in world.workers.items() if worker.place},
            magazines=world.magazine_names(),
        )
    )
    sharing.begin_anew(world)
    _take_stock(world, set(kept))
    world.check()
    world.check_whole()


def _take_stock(world: "World", certain: set[Known]) -> None:
    """Let workers notice what a restart has left of their leases."""
    left = world.known_ids()
    parts = [held for worker in world.workers.values() for held in worker.leases.values()]
    # A rank may know nothing of a move that another rank of its lease has asked for.
    moving = {held.lease_id for held in parts if held.is_moving}
    for worker in world.workers.values():
        for held in list(worker.leases.values()):
            known = (worker.worker_id, held.lease_id)
            if known not in left:
                if known in certain and held.lease_id not in moving:
                    world.fail("a restart lost a lease that nothing was happening to")
                del worker.leases[held.lease_id]
            elif held.is_moving:
                world.unsure.append((worker, held))
        if not worker.is_stalled:
            world.resume(worker)


def _certain(world: "World", command: commands.Command) -> set[Known]:
    """Return the leases that are there whether or not the command is carried out.

    Time and damaged bytes end leases that are in the host pool; apart from that, only a lease's owner ends it.
    """
    known = world.known_ids()
    if isinstance(command, commands.Tick | commands.CopyDone):
        below = {
            (worker.worker_id, held.lease_id)
            for worker in world.workers.values()
            for held in worker.leases.values()
            if held.is_evicted
        }
        return known - below
    return known
