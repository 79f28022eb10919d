"""Own the drain of a cache and its end: which calls are no longer granted, and which are told so."""

from kvleased.core.admission.refusals import draining
from kvleased.core.commands import Drain, Reserve, Undrain
from kvleased.core.effects import Drained, Outcome
from kvleased.core.state import CacheState


def drain(state: CacheState, command: Drain, now: float) -> Outcome:
    """Grant no new lease from now on, also not to calls that wait for one; running leases may finish.

    A repeated drain tells how far the drain has come, and sets anew whether the whole daemon drains.
    """
    del now
    state.is_draining, state.drains_daemon = True, command.is_daemon
    for waiter in [one for one in state.waiting if isinstance(one.command, Reserve)]:
        state.waiting.leave(waiter.ticket)
        state.wake(waiter.ticket, draining(state))
    for ticket in list(state.asking):
        del state.asking[ticket]
        state.wake(ticket, draining(state))
    return Outcome(reply=_drained(state))


def undrain(state: CacheState, command: Undrain, now: float) -> Outcome:
    """Grant leases again."""
    del command, now
    state.is_draining = False
    return Outcome(reply=_drained(state))


def _drained(state: CacheState) -> Drained:
    return Drained(num_leases=len(state.leases), num_waiting=len(state.waiting))
