"""Own what a refused call is told to change: settings, each written name=value, with which it would be granted."""

from bisect import bisect_left
from typing import Final

from kvlease.ids import BYTES_PER_KEY
from kvleased.core.commands import Extend, Reload, Reserve
from kvleased.core.reasons import OF_LEASES, Reason
from kvleased.core.shortages import Shortage, is_coming, need_of
from kvleased.core.state import CacheState
from kvleased.core.waiting import Waiter

_WAIT_MS_LEAST: Final = 2_000
"""The shortest wait that a refusal recommends, where calls may wait for so long."""
_OF_BLOCKS: Final = (Reason.BLOCKS, Reason.LIMITS)
"""Reasons for which a call that asks for less is served."""


def remedies(state: CacheState, waiter: Waiter, lack: Shortage) -> tuple[str, ...]:
    """Return what a waiting or refused call could ask for instead, the change that serves it soonest first."""
    found = []
    command = waiter.command
    if lack.reason in _OF_BLOCKS and not isinstance(command, Reload):
        found += _fewer_tokens(state, command, lack)
    if lack.reason not in OF_LEASES and is_coming(state, lack):
        found += longer_wait(state, command.wait_ms)
    return tuple(found)


def longer_wait(state: CacheState, wait_ms: int) -> tuple[str, ...]:
    """Return a wait that is longer than a call's own, if it may wait for longer."""
    longer = min(state.shape.wait_ms_max, max(_WAIT_MS_LEAST, 2 * wait_ms))
    return (f"wait_ms={longer}",) if longer > wait_ms else ()


# Fewer tokens ---------------------------------------------------------------------------------------------------------


def _fewer_tokens(state: CacheState, command: Reserve | Extend, lack: Shortage) -> list[str]:
    """Return the largest numbers of tokens that the call would get at once, and after blocks are zeroed for it."""
    tenant = state.workers[command.worker_id]
    at_once = _num_at_once(state, tenant, lack)
    tokens_at_once = _num_tokens(state, command, lack, at_once)
    found = _asking_for(state, command, lack, tokens_at_once)
    num_tokens = _num_tokens(state, command, lack, lack.available)
    if num_tokens > tokens_at_once:
        wait_ms = command.wait_ms or min(state.shape.wait_ms_max, _WAIT_MS_LEAST)
        found += [
            f"{one} wait_ms={wait_ms}" for one in _asking_for(state, command, lack, num_tokens)
        ]
    return found


def _num_tokens(
    state: CacheState, command: Reserve | Extend, lack: Shortage, num_blocks: int
) -> int:
    """Return the most tokens for which so many fresh blocks do, or 0 where the call gets no block for them."""
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
    hash_tokens = state.shape.hash_tokens
    num_keys = len(command.keys) // BYTES_PER_KEY if isinstance(command, Reserve) else 0
    if num_keys * hash_tokens < num_tokens + hash_tokens:
        return [f"num_tokens={num_tokens}"]
    if len(lack.prefix.below):
        return []
    return [f"num_tokens={num_tokens} num_keys={num_tokens // hash_tokens}"]


def _num_at_once(state: CacheState, tenant: int, lack: Shortage) -> int:
    """Count the blocks that a call could have without waiting for any to be scrubbed for its tenant."""
    device = state.device
    if device.is_only_of(tenant):
        return lack.available
    num_unsuitable = len(device.unsuitable(device.num_free, tenant))
    evictable = device.victims(len(device.order), lack.prefix.blocks)
    if not num_unsuitable and (device.records.tenant[evictable] == tenant).all():
        return lack.available
    return min(lack.available, device.num_free - num_unsuitable)
