"""Own what a refused call is told to change: settings, each written name=value, with which it would be granted."""

from bisect import bisect_left
from dataclasses import replace
from typing import Final

from kvlease.ids import BYTES_PER_KEY
from kvleased.core.admission.room import num_at_once
from kvleased.core.admission.shortages import Shortage, need_of, shortage
from kvleased.core.commands import Extend, Reload, Reserve
from kvleased.core.lease.phases import Phase
from kvleased.core.prefix.chains import asking_for
from kvleased.core.reasons import OF_LEASES, Reason
from kvleased.core.state import CacheState
from kvleased.core.waiting import Waiter

_WAIT_MS_LEAST: Final = 2_000
"""The shortest wait that a refusal recommends, if calls may wait for so long."""
_OF_BLOCKS: Final = (Reason.BLOCKS, Reason.LIMITS)
"""A call that is not served for one of these reasons may be served if it asks for less."""


def remedies(state: CacheState, waiter: Waiter, lack: Shortage) -> tuple[str, ...]:
    """Return what a waiting or refused call could ask for instead, the change that serves it soonest first."""
    command = waiter.command
    if (
        isinstance(command, Extend)
        and state.leases.by_id[command.lease_id].phase is not Phase.ACTIVE
    ):
        # The lease is on its way down, and can only be extended once it is back.
        return ()
    found = _remedies(state, waiter, lack)
    if not lack.prefix.remote_keys:
        return found
    # By then, the remote store may have forgotten what it said it has.
    forgotten = replace(waiter, remote_keys=frozenset())
    others = _remedies(state, forgotten, shortage(state, forgotten, lack.num_ahead))
    return tuple(one for one in found if one in others)


def _remedies(state: CacheState, waiter: Waiter, lack: Shortage) -> tuple[str, ...]:
    found: list[str] = []
    command, num_tokens = waiter.command, 0
    is_bound = _is_bound(state, waiter)
    if lack.reason in _OF_BLOCKS and not isinstance(command, Reload) and not is_bound:
        num_tokens = _num_tokens_at_once(state, command, lack)
        found += _asking_for(state, command, lack, num_tokens)
    if lack.reason in OF_LEASES:
        return tuple(found)
    patient = _if_it_waited(state, waiter, lack)
    if patient.is_coming:
        found += longer_wait(state, command.wait_ms)
    elif lack.reason in _OF_BLOCKS and not isinstance(command, Reload) and not is_bound:
        found += _in_time(state, command, patient, num_tokens)
    return tuple(found)


def _is_bound(state: CacheState, waiter: Waiter) -> bool:
    """Tell whether another call of the engine waits for the same request: then both must ask for the same tokens."""
    return waiter.request is not None and any(
        one is not waiter and one.request == waiter.request for one in state.callers
    )


def _if_it_waited(state: CacheState, waiter: Waiter, lack: Shortage) -> Shortage:
    """Return what a call would lack if it waited: it might get more of its prefix, and need more blocks for that."""
    command = waiter.command
    if command.wait_ms or not isinstance(command, Reserve) or not command.keys:
        return lack
    patient = replace(waiter, command=replace(command, wait_ms=_WAIT_MS_LEAST))
    return shortage(state, patient, lack.num_ahead)


def longer_wait(state: CacheState, wait_ms: int) -> tuple[str, ...]:
    """Return a wait that is longer than a call's own, if calls may wait for longer."""
    longer = min(state.shape.wait_ms_max, max(_WAIT_MS_LEAST, 2 * wait_ms))
    return (f"wait_ms={longer}",) if longer > wait_ms else ()


# Fewer tokens ---------------------------------------------------------------------------------------------------------


def _num_tokens_at_once(state: CacheState, command: Reserve | Extend, lack: Shortage) -> int:
    """Return the most tokens that a call would get at once, or 0."""
    tenant = state.workers[command.worker_id]
    return _num_tokens(state, command, lack, num_at_once(state, tenant, lack.prefix.blocks))


def _in_time(state: CacheState, command: Reserve | Extend, lack: Shortage, least: int) -> list[str]:
    """Say how to ask for the most tokens that a call would get once copies and scrubs end, if above `least`."""
    num_tokens = _num_tokens(state, command, lack, lack.available_soon)
    if num_tokens <= least:
        return []
    # A wait that has just been too short would be so again.
    wait_ms = min(state.shape.wait_ms_max, max(command.wait_ms, _WAIT_MS_LEAST))
    return [f"{one} wait_ms={wait_ms}" for one in _asking_for(state, command, lack, num_tokens)]


def _num_tokens(
    state: CacheState, command: Reserve | Extend, lack: Shortage, num_blocks: int
) -> int:
    """Return the most tokens for which `num_blocks` fresh blocks suffice, or 0 if the call would get none of them."""
    sizes = range(1, command.num_tokens)

    def is_too_much(num_tokens: int) -> bool:
        return need_of(state, command, lack.prefix, num_tokens) > num_blocks

    num_tokens = bisect_left(sizes, True, key=is_too_much)
    if num_tokens <= lack.prefix.hit_tokens:
        return 0
    return num_tokens if need_of(state, command, lack.prefix, num_tokens) else 0


def _asking_for(
    state: CacheState, command: Reserve | Extend, lack: Shortage, num_tokens: int
) -> list[str]:
    """Say how to ask for so many tokens: with as many of the call's keys as they cover."""
    if not num_tokens:
        return []
    num_keys = len(command.keys) // BYTES_PER_KEY if isinstance(command, Reserve) else 0
    asked = asking_for(num_tokens, num_keys, state.shape.hash_tokens)
    if "num_keys" in asked and not _finds_as_much(state, lack, num_tokens):
        return []
    return [asked]


def _finds_as_much(state: CacheState, lack: Shortage, num_tokens: int) -> bool:
    """Tell whether a call that has no keys behind so many tokens still finds the same prefix."""
    if len(lack.prefix.below):
        # Less would be found in the lower tiers.
        return False
    groups, hit_tokens = state.shape.groups, lack.prefix.hit_tokens
    # A draft model needs one block behind the prefix, too.
    behind = max((one.tokens_per_block for one in groups if one.is_drafted), default=0)
    return not hit_tokens or num_tokens >= hit_tokens + behind
