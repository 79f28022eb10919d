"""Own what follows when a lower tier stops working, works again, or turns out to be another one than before."""

from kvlease.errors import CopyFailedError
from kvleased.core.commands import TierChanged
from kvleased.core.copies.landing import doubt
from kvleased.core.effects import Direction, Done, Outcome, Tier
from kvleased.core.state import CacheState
from kvleased.core.suspects import Suspects
from kvleased.core.verbs.asking import end_all_asking


def tier_changed(state: CacheState, command: TierChanged, now: float) -> Outcome:
    """Note whether a lower tier works; no call waits for the answer of a store that does not."""
    state.dirt.is_due = state.dirt.is_any
    if command.is_empty:
        assert command.tier is Tier.DISK, "what the remote store has is not known here"
        _forget_disk(state, now)
    if command.tier is Tier.DISK:
        state.is_disk_read = command.is_read
    if command.is_on:
        state.tiers_off.discard(command.tier)
        if command.tier is Tier.REMOTE and state.was_remote_away:
            state.was_remote_away = False
            state.dirt.share_again(state.host.records.state)
        return Outcome(reply=Done())
    was_on = command.tier not in state.tiers_off
    state.tiers_off.add(command.tier)
    if command.tier is Tier.REMOTE:
        # Only if its mover saw the store stop may the store come back without what it had.
        state.was_remote_away |= was_on and not command.is_mover_away
        end_all_asking(state, now)
    return Outcome(reply=Done())


def _forget_disk(state: CacheState, now: float) -> None:
    """Take everything in the disk store for lost, and what the host pool has for not stored.

    Loads under way go on, because the bytes that they bring are verified. Copies to the store that are under way count
    as failed, because nobody knows whether they went to the old store or to the new one.
    """
    for flight in state.flights.values():
        if flight.direction is Direction.STORE and not flight.is_lost:
            doubt(state, flight, CopyFailedError("the disk store was replaced"), now)
    state.suspects = Suspects()
    state.counters["disk_slots_forgotten"] += state.disk.forget_all()
    state.dirt.store_again(state.host.records.state)
