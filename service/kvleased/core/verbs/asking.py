"""Own the calls that first wait to learn which blocks of their prefix the remote store has.

The remote store has no index here, so a call that may wait asks it for the blocks of its prefix that no tier has.
Meanwhile the call holds nothing and has no place in the line. When the store has answered, the call goes on like any
other. If the store turns out not to work, or the call's time is over, it goes on without an answer and takes nothing
from the store. A call asks once. Ranks of an engine that call apart each ask for themselves; the first to go on gets
the lease, and the others share it.
"""

from typing import Final, NamedTuple

import numpy as np

from kvlease.errors import InvalidError, KVLeaseError
from kvlease.ids import BYTES_PER_KEY
from kvleased.core.admission.refusals import superseded
from kvleased.core.blocks.marks import key_words
from kvleased.core.commands import Probed, Reserve
from kvleased.core.effects import Done, Outcome, Probe, Tier
from kvleased.core.frames import without_frames
from kvleased.core.ids import Ids
from kvleased.core.prefix.looking import EVERYWHERE, keys_at
from kvleased.core.prefix.search import Match, keys_of_groups, look_everywhere, match, positions_of
from kvleased.core.state import CacheState, split_keys
from kvleased.core.tier.labels import pack_labels
from kvleased.core.untold import Silence, Untold
from kvleased.core.verbs.seating import (
    check_call,
    new_waiter,
    seat_waiter,
    supersede_waiting,
)
from kvleased.core.waiting import Asking

LABELS_MAX: Final = 4096
"""Blocks that a call asks the remote store for at most; blocks behind them are computed."""


class _Blocks(NamedTuple):
    """Some blocks of a chain."""

    keys: bytes
    positions: Ids
    """The index of each key in the chain."""
    untold: Untold | None = None
    """The keys behind these of which the store is not asked, because they are too many; None if there are none."""


def ask(state: CacheState, command: Reserve, now: float) -> Outcome | None:
    """Ask the remote store what it has, and let the call wait for the answer; None if there is nothing to ask for."""
    check_call(state, command)
    if Tier.REMOTE in state.tiers_off or state.is_crowded or not state.covering.shared:
        return None
    if not command.keys:
        return None
    missing = _missing(state, command)
    if not missing.keys:
        return None
    waiter = new_waiter(state, command, command.worker_id, now)
    waiter.untold = missing.untold
    supersede_waiting(state, waiter)
    keys = tuple(split_keys(missing.keys))
    state.asking[waiter.ticket] = Asking(waiter=waiter, keys=keys, positions=missing.positions)
    tenant = state.workers[command.worker_id]
    labels = pack_labels(missing.keys, tenant, missing.positions)
    state.effects.append(Probe(probe_id=waiter.ticket, labels=labels))
    state.counters["remote_asked"] += len(keys)
    return Outcome(ticket=waiter.ticket)


def supersede_asking(state: CacheState, command: Reserve, ticket: int | None) -> None:
    """Answer the earlier calls of a request that still wait for the remote store, as a later call has replaced them."""
    for asking in list(state.asking.values()):
        other = asking.waiter
        if other.worker_id != command.worker_id or other.ticket == ticket:
            continue
        assert isinstance(other.command, Reserve), "only new requests ask"
        if other.command.request_id == command.request_id:
            del state.asking[other.ticket]
            state.wake(other.ticket, superseded(state, command.wait_ms))


# What to ask for ------------------------------------------------------------------------------------------------------


def _missing(state: CacheState, command: Reserve) -> _Blocks:
    """Return the first blocks that the tenant has in no tier and that could make the prefix longer.

    What others have under stolen keys changes nothing, so the call takes the same way whether they have it or nobody.
    """
    tenant = state.workers[command.worker_id]
    try:
        prefix = match(state, command.keys, tenant, EVERYWHERE)
    except InvalidError:
        # The call is refused for this when its turn comes.
        return _Blocks(b"", np.empty(0, np.intp))
    behind = _behind(command, prefix) if state.is_simple else _in_groups(state, command, prefix)
    _, has, _ = look_everywhere(state, behind.keys, tenant, EVERYWHERE)
    (missing,) = (~has).nonzero()
    missing = missing[behind.positions[missing].argsort(kind="stable")]
    asked, left = missing[:LABELS_MAX], missing[LABELS_MAX:]
    untold = behind.untold
    if len(left):
        untold = Untold(Silence.UNASKED, int(behind.positions[left[0]]))
    return _Blocks(keys_at(behind.keys, asked), behind.positions[asked], untold)


def _behind(command: Reserve, prefix: Match) -> _Blocks:
    """Return the blocks behind a prefix in a simple cache, at most `LABELS_MAX`."""
    first = len(prefix.entries)
    after = first + LABELS_MAX
    keys = command.keys[first * BYTES_PER_KEY : after * BYTES_PER_KEY]
    has_more = after * BYTES_PER_KEY < len(command.keys)
    untold = Untold(Silence.UNASKED, after) if has_more else None
    return _Blocks(keys, np.arange(first, first + len(keys) // BYTES_PER_KEY), untold)


def _in_groups(state: CacheState, command: Reserve, prefix: Match) -> _Blocks:
    """Return the blocks of all groups that a longer prefix could need."""
    covering, words = state.covering, key_words(command.keys)
    keys, counts = keys_of_groups(covering, words)
    is_longest = prefix.hit_tokens + covering.hit_tokens > len(words) * covering.hash_tokens
    is_needed = [
        np.arange(count) >= (count if is_longest else covering.first_needed(at, prefix.hit_tokens))
        for at, count in zip(covering.shared, counts, strict=True)
    ]
    (places,) = np.concatenate(is_needed).nonzero()
    return _Blocks(keys_at(keys, places), positions_of(covering, counts)[places])


# Answers --------------------------------------------------------------------------------------------------------------


def probed(state: CacheState, command: Probed, now: float) -> Outcome:
    """Take the remote store's answer, and let the call that has waited for it go on."""
    asking = state.asking.get(command.probe_id)
    if asking is None:
        state.counters["probes_unknown"] += 1
        return Outcome(reply=Done())
    if not command.is_present:
        _go_on_unanswered(state, asking, now)
        return Outcome(reply=Done())
    # An answer that is cut short tells nothing of the remaining keys.
    told = zip(asking.keys, command.is_present, strict=False)
    keys = frozenset(key for key, is_present in told if is_present)
    if len(command.is_present) < len(asking.keys):
        first_key = int(asking.positions[len(command.is_present)])
        asking.waiter.untold = Untold(Silence.UNANSWERED, first_key)
    state.counters["remote_present"] += len(keys)
    _go_on(state, asking, keys, now)
    return Outcome(reply=Done())


def _go_on(state: CacheState, asking: Asking, remote_keys: frozenset[bytes], now: float) -> None:
    waiter = asking.waiter
    del state.asking[waiter.ticket]
    waiter.remote_keys = remote_keys
    try:
        outcome = seat_waiter(state, waiter, now)
    except KVLeaseError as error:
        state.wake(waiter.ticket, without_frames(error))
        return
    if outcome.reply is not None:
        state.wake(waiter.ticket, outcome.reply)


def _go_on_unanswered(state: CacheState, asking: Asking, now: float) -> None:
    asking.waiter.untold = Untold(Silence.UNANSWERED, 0)
    _go_on(state, asking, frozenset(), now)


def end_asking(state: CacheState, now: float) -> None:
    """Let calls whose time is up go on without an answer: if they lack room, they are refused as any others."""
    for asking in list(state.asking.values()):
        if asking.waiter.deadline <= now:
            _go_on_unanswered(state, asking, now)


def end_all_asking(state: CacheState, now: float) -> None:
    """Let all calls go on without an answer, because none will come."""
    for asking in list(state.asking.values()):
        _go_on_unanswered(state, asking, now)
