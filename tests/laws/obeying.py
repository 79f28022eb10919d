"""The law of remedies: a caller that asks for what a refusal names is granted it, if nothing else happens before.

It is tried in a copy of the process, which ends with the try, so that the history goes on as if nobody had obeyed.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvlease.errors import KVLeaseError
from kvlease.ids import BYTES_PER_KEY, CopyId
from kvleased.core import Cache, commands
from kvleased.core.effects import Copy, Direction, Effect, Outcome, Stepped, Wake
from kvleased.core.tier.flights import Flight
from tests.laws.actors import ViolationError
from tests.laws.shapes import obeys

if TYPE_CHECKING:
    from tests.laws.world import World

_TRIES: Final = 2
"""So many refusals of each kind are obeyed in a history, and after that one in `_SELDOM`."""
_SELDOM: Final = 8
_LATER: Final = ("DRAINING", "POOL_FULL", "ID_REUSED")
"""Other refusals that a caller may get that obeys a NEVER_FITS: the call would fit in time, but perhaps not now."""
_DOWN: Final = (Direction.OFFLOAD, Direction.STORE)
"""Copies for which blocks may leave a full host pool or disk store."""
_COPIES: Final = 64
"""More than the copies that can be in flight, or follow one another, if nobody asks for more."""


def keep_their_word(
    world: "World",
    command: commands.Command,
    outcome: Outcome | KVLeaseError,
    effects: Iterable[Effect],
) -> None:
    """Check that every caller that was told a remedy, by a command's refusal or later, is granted it.

    What begins behind the refusals of a step may hold what they name. A copy down that begins behind another refusal
    may push out what the remedy counts on.
    """
    if not obeys(world.seed):
        return
    refusals = [one for one in _refusals(world, command, outcome, effects) if one[1].remedies]
    if not refusals:
        return
    has_more = isinstance(command, commands.Step) and any(isinstance(one, Copy) for one in effects)
    refused = {one for one, _, _ in refusals}
    if has_more or _is_overtaken(world, refused) or _is_pushed_out(effects):
        world.seen["remedies overtaken"] += 1
        return
    for _, error, call in refusals:
        for remedy in error.remedies:
            broken = ""
            if _is_tried(world, call, error, remedy):
                broken = _tried(world, call, error, remedy)
            if broken:
                world.fail(f"{call} was refused: {error!r}; with {remedy}: {broken}")


def _refusals(
    world: "World",
    command: commands.Command,
    outcome: Outcome | KVLeaseError,
    effects: Iterable[Effect],
) -> Iterator[tuple[int | None, KVLeaseError, Any]]:
    """Go through the refused calls: the ticket if the call waited, the reason, and what it had asked for."""
    if isinstance(outcome, KVLeaseError):
        yield None, outcome, command
    elif isinstance(command, commands.Step) and isinstance(outcome.reply, Stepped):
        # An operation behind a refusal may take what its remedy names.
        for reserve, error in [*zip(command.reserves, outcome.reply.reserves, strict=True)][-1:]:
            if isinstance(error, KVLeaseError):
                yield None, error, reserve
    for effect in effects:
        if isinstance(effect, Wake) and isinstance(effect.result, KVLeaseError):
            call = world.calls.get(effect.ticket)
            if call is not None:
                yield effect.ticket, effect.result, call.command


def _is_overtaken(world: "World", refused: set[int | None]) -> bool:
    """Tell whether a call that waited was granted something at the same moment."""
    state = world.cache._state
    gone = set(world.turns.order) - set(state.waiting.by_ticket) - refused
    return bool(gone or set(state.leases.by_id) - world.lease_ids)


def _is_pushed_out(effects: Iterable[Effect]) -> bool:
    """Tell whether a copy down begins behind a refusal, as one does once no call waits.

    A block that the refused call would find may have left a lower tier for it. Then the prefix is shorter, and the call
    may need more blocks.
    """
    behind = dropwhile(lambda one: not _is_refusal(one), effects)
    return any(isinstance(one, Copy) and one.direction in _DOWN for one in behind)


def _is_refusal(effect: Effect) -> bool:
    return isinstance(effect, Wake) and isinstance(effect.result, KVLeaseError)


def _is_tried(world: "World", command: commands.Command, error: KVLeaseError, remedy: str) -> bool:
    """Tell whether to try a remedy: often enough for each kind, because a try takes as long as many commands."""
    names = "".join(one for one in remedy if not one.isdigit())
    kind = f"obeyed: {type(command).__name__} {error.code} {error.resource} {error.rule} {names}"
    world.seen[kind] += 1
    return world.seen[kind] <= _TRIES or world.seen[kind] % _SELDOM == 0


def _tried(world: "World", command: Any, error: KVLeaseError, remedy: str) -> str:
    """Try a remedy in a copy of this process, and return what is wrong with it; "" if nothing is."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        text = "the try did not end"
        try:
            text = _obey(world.cache, world.now, _changed(command, remedy), error)
        except BaseException as broken:  # noqa: BLE001 - the copy must end here, and its parent tell of it
            text = f"{type(broken).__name__}: {broken}"
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    os.waitpid(pid, 0)
    return text


def _changed(command: Any, remedy: str) -> list[Any]:
    """Return the commands that a remedy asks for: the changed command, or for an evict, first a trim of the lease."""
    settings = {name: int(value) for name, value in (one.split("=") for one in remedy.split())}
    if "num_keys" in settings:
        command = replace(command, keys=command.keys[: BYTES_PER_KEY * settings.pop("num_keys")])
    if isinstance(command, commands.Evict):
        assert command.worker_id is not None, "only a worker moves a lease"
        assert command.lease_id is not None, "cached blocks leave without a trim"
        trim = commands.Trim(worker_id=command.worker_id, lease_id=command.lease_id, **settings)
        return [trim, command]
    return [replace(command, **settings)]


def _obey(cache: Cache, now: float, acts: list[Any], error: KVLeaseError) -> str:
    """Return what is wrong with the answer to a changed command, when nobody else waits and all copies have ended."""
    *before, command = acts
    if before or getattr(command, "wait_ms", 0):
        for waiter in reversed([*cache._state.callers]):
            cache.handle(commands.Cancel(ticket=waiter.ticket), now)
    for one in before:
        cache.handle(one, now)
    if before or error.code == "DEADLINE":
        # Copies that were begun in vain, or by the commands before, are in the way until they end.
        deque(_end_copies(cache, now), maxlen=0)
    try:
        outcome = cache.handle(command, now)
    except KVLeaseError as other:
        is_later = error.code == "NEVER_FITS" and other.code in _LATER
        return "" if is_later else f"{other!r}"
    if outcome.reply is not None or error.code == "NEVER_FITS":
        return ""
    for effect in [*outcome.effects, *_end_copies(cache, now)]:
        if isinstance(effect, Wake) and effect.ticket == outcome.ticket:
            return f"{effect.result!r}" if isinstance(effect.result, KVLeaseError) else ""
    return f"it waits, {cache!r}"


def _end_copies(cache: Cache, now: float) -> Iterator[Effect]:
    """Let all copies end, and the remote store have nothing; go through the resulting effects."""
    for _ in range(_COPIES):
        # A large lease is moved in parts, which come after the promise of an answer.
        cache.settle()
        yield from cache.take_effects()
        end = next(_ends(cache), None)
        if end is None:
            return
        yield from cache.handle(end, now).effects
    raise ViolationError(f"there is always another copy: {cache._state.flights}")


def _ends(cache: Cache) -> Iterator[commands.Command]:
    """Go through the commands that end what is on its way."""
    for probe_id in cache._state.asking:
        yield commands.Probed(probe_id=probe_id)
    for copy_id, flight in cache._state.flights.items():
        if not flight.is_lost:
            yield _done(copy_id, flight)


def _done(copy_id: CopyId, flight: Flight) -> commands.CopyDone:
    return commands.CopyDone(
        copy_id=copy_id, checksums=np.ones(flight.num_pairs, np.uint64).tobytes()
    )
