"""Own the life of a block and of a slot: every transition there is, as two tables, and the one function that makes one.

The law in prose. A block is FREE until it is granted to one lease or magazine (RESERVED), filled by a
copy (FILLING) or zeroed because its tenant changes (SCRUBBING). A RESERVED block belongs to exactly
one lease, whose worker alone may write it, or to one magazine, whose engine alone may. Commit makes it
READY: findable under its key, read-only for everyone, evictable once nobody holds it. A magazine that
alone holds it can take it back to write it anew; then nobody finds it any more. When a lease is not
renewed, its blocks are QUARANTINED: nobody gets them, because a stalled worker may still write; time
alone never leads out of that state, only the owner's own word (commit, revival, release), the proof of
its death, or the end of the mover that wrote. A copy that failed leaves its target FREE if the mover
said so itself and QUARANTINED if it did not answer. BAD is final. Time never ends what a magazine
holds; the death of its last process does. PARKED blocks are those that an operator took out of use:
they were free, nobody has them, and their memory may be given back until the pool grows again.

A slot lives the same life, less what only a worker can cause: no worker ever writes a slot. One end
is not final there: a disk store that was replaced by another has forgotten all of its slots, the
retired ones too; each can be used again when nobody reads it any more.
"""

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray


class State(IntEnum):
    """Where a block or slot is in its life."""

    FREE = 0
    """Nobody's."""
    RESERVED = 1
    """Private to one lease or magazine, which may write it (a block) or has its bytes there (a slot)."""
    FILLING = 2
    """The target of a copy in flight."""
    READY = 3
    """Committed, sealed, findable, read-only."""
    QUARANTINED = 4
    """Kept from everyone until it is proven that nobody writes it."""
    SCRUBBING = 5
    """Being overwritten with zeros before it changes hands."""
    BAD = 6
    """Retired for good."""
    PARKED = 7
    """Taken out of use until the pool grows again; its bytes are nobody's and may be gone."""


class Event(IntEnum):
    """What can happen to a block or slot."""

    GRANT = 0
    """A lease or a magazine takes it for writing."""
    FILL = 1
    """A copy into it begins."""
    FILLED = 2
    """The copy is done and verified, under a key."""
    RESTORED = 3
    """The copy is done and verified, privately to one lease."""
    FAIL = 4
    """The copy failed, and its mover says that it writes no more."""
    DOUBT = 5
    """The copy did not answer in time; its mover may still write."""
    COMMIT = 6
    """Its owner says that it holds what its key says."""
    ABANDON = 7
    """Its last holder lets go of it."""
    EXPIRE = 8
    """Its owner's lease was not renewed."""
    REVIVE = 9
    """Its owner, thought stalled, speaks again."""
    PROVE = 10
    """It is proven that nobody writes it any more."""
    EVICT = 11
    """It leaves its tier."""
    SCRUB = 12
    """Zeroing begins."""
    SCRUBBED = 13
    """Zeroing is done."""
    RETIRE = 14
    """Its bytes turned out to differ from what was written, or cannot be written."""
    FORGET = 15
    """The store that it was in is another one now."""
    RETRACT = 16
    """Its only holder, a magazine, is going to write it again."""
    PARK = 17
    """The pool is made smaller."""
    UNPARK = 18
    """The pool grows again."""


Transitions = dict[State, dict[Event, State]]

BLOCK_TRANSITIONS: Final[Transitions] = {
    State.FREE: {
        Event.GRANT: State.RESERVED,
        Event.FILL: State.FILLING,
        Event.SCRUB: State.SCRUBBING,
        Event.PARK: State.PARKED,
    },
    State.RESERVED: {
        Event.COMMIT: State.READY,
        Event.ABANDON: State.FREE,
        Event.EXPIRE: State.QUARANTINED,
    },
    State.FILLING: {
        Event.FILLED: State.READY,
        Event.RESTORED: State.RESERVED,
        Event.FAIL: State.FREE,
        Event.DOUBT: State.QUARANTINED,
    },
    State.READY: {Event.EVICT: State.FREE, Event.RETRACT: State.RESERVED},
    State.QUARANTINED: {
        Event.COMMIT: State.READY,
        Event.REVIVE: State.RESERVED,
        Event.PROVE: State.FREE,
    },
    State.SCRUBBING: {
        Event.SCRUBBED: State.FREE,
        Event.FAIL: State.FREE,
        Event.DOUBT: State.QUARANTINED,
    },
    State.BAD: {},
    State.PARKED: {Event.UNPARK: State.FREE},
}
"""The life of a device block."""

SLOT_TRANSITIONS: Final[Transitions] = {
    State.FREE: {
        Event.FILL: State.FILLING,
        Event.RETIRE: State.BAD,
        Event.PARK: State.PARKED,
    },
    State.RESERVED: {Event.ABANDON: State.FREE, Event.RETIRE: State.BAD},
    State.FILLING: {
        Event.FILLED: State.READY,
        Event.RESTORED: State.RESERVED,
        Event.FAIL: State.FREE,
        Event.DOUBT: State.QUARANTINED,
    },
    State.READY: {
        Event.EVICT: State.FREE,
        Event.RETIRE: State.BAD,
        Event.FORGET: State.QUARANTINED,
    },
    State.QUARANTINED: {Event.PROVE: State.FREE},
    State.SCRUBBING: {},
    State.BAD: {Event.FORGET: State.QUARANTINED},
    State.PARKED: {Event.UNPARK: State.FREE},
}
"""The life of a slot in a lower tier."""

ILLEGAL: Final = 255
"""Stands in a compiled table where there is no transition."""

_ILLEGAL_BYTE: Final = bytes([ILLEGAL])

CompiledTransitions = tuple[tuple[bytes, NDArray[np.uint8]], ...]
"""For each event: a row for `bytes.translate` from the state before to the state after or ILLEGAL; and the state after.

The latter is an array of no dimensions: setting a column to it takes half the time that a plain number takes.
"""


def compile_transitions(transitions: Transitions) -> CompiledTransitions:
    """Return the transitions in the form in which `advance` looks them up."""
    rows = [bytearray([ILLEGAL]) * 256 for _ in Event]
    afters = [ILLEGAL for _ in Event]
    for before, events in transitions.items():
        for event, after in events.items():
            assert afters[event] in (ILLEGAL, after), f"{event.name} leads to two states"
            rows[event][before] = afters[event] = int(after)
    return tuple(
        (bytes(row), np.array(after, np.uint8)) for row, after in zip(rows, afters, strict=True)
    )


def advance(
    table: CompiledTransitions,
    states: NDArray[np.uint8],
    ids: NDArray[np.signedinteger],
    event: Event,
) -> None:
    """Make one transition for all `ids`, or none at all: an illegal one is our own mistake and changes nothing."""
    row, after = table[event]
    # Translating and searching bytes takes a tenth of the time of array operations.
    is_legal = _ILLEGAL_BYTE not in states[ids].tobytes().translate(row)
    assert is_legal, f"{event.name} from {np.unique(states[ids])}"
    states[ids] = after


def by_state(states: NDArray[np.uint8]) -> list[tuple[int, slice | NDArray[np.bool_]]]:
    """Return each state that occurs, and where: as a slice if all entries of the state follow one another.

    They nearly always do, because cached blocks come before private ones; slicing takes a fraction of the time.
    """
    packed = rest = states.tobytes()
    found: list[tuple[int, slice | NDArray[np.bool_]]] = []
    while rest:
        state, count, first = rest[0], rest.count(rest[0]), packed.index(rest[0])
        is_run = packed.count(state, first, first + count) == count
        found.append((state, slice(first, first + count) if is_run else states == state))
        rest = rest.translate(None, rest[:1])
    return found
