"""Own the verb that takes blocks back from a running lease, and the cutting of a row to what its token counts need."""

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError, WrongStateError
from kvlease.groups import Keeps
from kvleased.core.blocks.records import NULL
from kvleased.core.commands import Trim
from kvleased.core.effects import Outcome, Trimmed
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import LeaseBook
from kvleased.core.lease.phases import Phase
from kvleased.core.state import CacheState
from kvleased.core.verbs.ending import renew
from kvleased.core.verbs.joining import agreed_trim, check_no_states
from kvleased.counted import counted


def trim(state: CacheState, command: Trim, now: float) -> Outcome:
    """Take back a lease's blocks behind a token; the newest state of recurrent layers stays."""
    lease = state.lease_of(command)
    check_no_states(lease.members, "trimmed")
    leases, rows, row = state.leases, state.leases.rows, lease.row
    num_computed = int(rows.num_computed[row])
    least = max(1, num_computed)
    if command.num_tokens < least:
        msg = (
            f"num_tokens is {command.num_tokens}, but the states of {counted(num_computed, 'token')} are already "
            f"written; trim to at least {least}"
        )
        raise InvalidError(msg, resource="num_tokens", need=command.num_tokens, limit=least)
    renew(state, lease, now)
    if lease.phase is not Phase.ACTIVE:
        msg = f"the lease is {lease.phase.name.lower()}; only an active lease can be trimmed"
        raise WrongStateError(msg, resource="lease")
    num_tokens = command.num_tokens
    if lease.members is not None:
        num_tokens = agreed_trim(state, lease, lease.members, command)
    if num_tokens >= rows.num_tokens[row]:
        return Outcome(reply=Trimmed(num_given_back=0))
    # A crash from here on leaves blocks behind the end, which recovery cuts off.
    rows.num_tokens[row] = num_tokens
    left = cut(leases, row)
    if lease.members is not None:
        lease.members.forget_behind(leases.covering.room_tokens(rows.num_blocks[row].tolist()))
    for group, part in enumerate(leases.parts_of(row)):
        first = leases.covering.first_held(group, num_computed, len(part))
        if leases.covering.groups[group].keeps is not Keeps.STATE:
            first = len(part)
        leases.kernel.append(row, group, first, part[first:])
    state.device.let_go(left)
    state.counters["blocks_given_back"] += len(left)
    state.tell("lease_trimmed", lease, num_blocks=len(left))
    return Outcome(reply=Trimmed(num_given_back=len(left)))


def cut(leases: LeaseBook, row: int) -> Ids:
    """Empty the places of a row that its token counts do not need; return their blocks, ordered by where they end.

    A crash may cut this off; it is then done again.
    """
    rows, covering = leases.rows, leases.covering
    num_computed, num_tokens = int(rows.num_computed[row]), int(rows.num_tokens[row])
    # One of several ranks may have computed more tokens than all ranks have.
    furthest = max(num_computed, num_tokens) if rows.engine[row] else num_computed
    left: list[Ids] = []
    ends: list[Ids] = []
    for group, shape in enumerate(covering.groups):
        part, before = leases.part(row, group), int(rows.num_blocks[row, group])
        end = min(before, covering.last_covered(group, furthest, num_tokens))
        first = covering.first_needed(group, num_computed) if shape.gives_back else 0
        places = np.concatenate([np.arange(min(first, end)), np.arange(end, before)])
        newest = covering.first_held(group, num_computed, end)
        if shape.keeps is Keeps.STATE:
            _empty_passed(part[:before], newest)
        gone = places[part[places] != NULL]
        if shape.keeps is Keeps.STATE:
            _move_down(part[:before], newest, end)
            # A block that has moved down is still at its old place, too, and does not leave the lease.
            gone = gone[~np.isin(part[gone], part[first:end])]
        left.append(part[gone].astype(np.intp))
        ends.append(covering.end_tokens[covering.starts[group] + gone])
        part[: min(first, end)] = NULL
        rows.num_blocks[row, group] = end
    return np.concatenate(left)[np.concatenate(ends).argsort(kind="stable")]


def _empty_passed(part: NDArray[np.int32], newest: int) -> None:
    """Empty places before the newest state whose blocks have moved on, which growth leaves if a crash cuts it off."""
    passed = part[:newest]
    passed[np.isin(passed, part[newest:])] = NULL


def _move_down(part: NDArray[np.int32], first: int, end: int) -> None:
    """Move the blocks at and behind `first` together, without gaps from there on: the newest state comes first."""
    held = part[first:][part[first:] != NULL].tolist()
    moved = [*dict.fromkeys(held)][: max(0, end - first)]
    part[first : first + len(moved)] = moved
