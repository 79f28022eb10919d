"""What simulated engines do with their magazines, and what can go wrong; each answer is predicted and compared."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from kvlease.errors import IdReusedError, KVLeaseError, WrongStateError
from kvleased.core import commands
from kvleased.core.blocks.states import State
from kvleased.core.magazine_replies import Exchanged
from kvleased.core.state import split_keys
from tests.laws.actors import Worker
from tests.laws.crashes import Crash
from tests.laws.engines import Engine, MagazineWorld
from tests.laws.picks import pick_chain
from tests.laws.stores import has_stores

if TYPE_CHECKING:
    from tests.laws.world import World

_ENGINES_MAX: Final = 3
_LOST: Final = 0.08
"""Share of the answers that do not reach their engine."""
_ODD: Final = 0.15
"""Share of the entries that name a block that the engine does not have."""
_SHARE_OF_ALL: Final = 0.06
_PLACES: Final = (("exchanging", 70), ("magazines", 15), ("pool", 60), ("", 120))
"""Modules in which an exchange kills the control process, and the number of lines within which it does."""


def start(world: "World") -> None:
    """Start an engine, or another process of one."""
    assert isinstance(world, MagazineWorld)
    engines = world.living()
    if len(engines) < _ENGINES_MAX and (not engines or world.rng.random() < 0.5):
        world.start_engine(world.rng.choice((7, 7, 8)))
    else:
        world.start_process(world.rng.choice(engines))


def leave(world: "World") -> None:
    """Let a process of an engine detach; if it is the last one, the engine ends."""
    assert isinstance(world, MagazineWorld)
    found = world.awake()
    if found:
        _, worker = world.rng.choice(found)
        del world.workers[worker.worker_id]
        world.send(commands.Detach(worker_id=worker.worker_id))


def exchange(world: "World") -> None:
    """Let an engine make a random exchange."""
    assert isinstance(world, MagazineWorld)
    found = world.awake()
    if found:
        _exchange(world, *world.rng.choice(found))


def write(world: "World") -> None:
    """Let an engine, perhaps a stalled one, write some of its private blocks."""
    assert isinstance(world, MagazineWorld)
    for engine in world.living():
        if engine.is_in_doubt:
            continue
        for block in engine.private:
            if world.rng.random() < 0.5:
                mark = ("private", engine.tenant, engine.name, block, world.now)
                world.device[block] = engine.private[block] = mark


def repeat(world: "World") -> None:
    """Send an exchange again that was already carried out: it must be refused, and change nothing."""
    assert isinstance(world, MagazineWorld)
    found = [one for one in world.awake() if one[0].last and not one[0].is_in_doubt]
    if not found:
        return
    engine, worker = world.rng.choice(found)
    assert engine.last is not None
    world.faults["repeated exchange"] += 1
    late = commands.Exchange(
        worker_id=worker.worker_id,
        sequence=engine.last.sequence,
        publish_blocks=engine.last.publish_blocks,
        publish_keys=engine.last.publish_keys,
        drop_blocks=engine.last.drop_blocks,
        take_running=1 + engine.last.take_running,
    )
    if not isinstance(world.send(late), IdReusedError):
        world.fail("an exchange was carried out twice")


def crash(world: "World") -> None:
    """Kill the control process in the middle of an exchange."""
    module, most = world.rng.choice(_PLACES)
    world.crash = Crash(world.rng.randrange(most), module=module)
    exchange(world)


def _exchange(world: MagazineWorld, engine: Engine, worker: Worker) -> None:
    if engine.is_in_doubt:
        world.take_stock(engine, worker.worker_id)
    command = _command(world, engine, worker)
    told = _Foretold(world, engine)
    published, retracted = told.published(command), told.retracted(command)
    dropped = told.dropped(command)
    others = _others_have_blocks(world, engine)
    engine.is_in_doubt = True
    outcome = world.send(command)
    if isinstance(outcome, KVLeaseError):
        engine.is_in_doubt = False
        if not (command.holds_all and others and isinstance(outcome, WrongStateError)):
            world.fail(f"an exchange was refused: {outcome}")
        return
    if world.rng.random() < _LOST:
        world.faults["answer lost"] += 1
        return
    assert isinstance(outcome.reply, Exchanged)
    reply = outcome.reply
    if (published, retracted, dropped) != (reply.published, reply.retracted, reply.dropped):
        world.fail(f"an exchange did {reply}, not {published!r}, {retracted!r} and {dropped!r}")
    _take_over(world, engine, command, reply, told)


def _others_have_blocks(world: MagazineWorld, engine: Engine) -> bool:
    (places,) = (world.records.magazines.name == engine.name).nonzero()
    return bool((world.records.magazines.held_by & ~np.uint32(1 << int(places[0]))).any())


def _take_over(
    world: MagazineWorld,
    engine: Engine,
    command: commands.Exchange,
    reply: Exchanged,
    told: "_Foretold",
) -> None:
    """Let an engine take an answer, and compare it with what is there now."""
    engine.private, engine.held = told.private, told.held
    engine.sequence, engine.last, engine.is_in_doubt = command.sequence, command, False
    _take_held(world, engine, command, reply)
    taken = np.frombuffer(reply.taken_blocks, np.int32).tolist()
    num_new = len(taken) - reply.num_taken_running
    if reply.num_taken_running > command.take_running or num_new > command.take_new:
        world.fail(f"{reply} gives more than was wanted")
    wanted = ((reply.num_taken_running, command.take_running), (num_new, command.take_new))
    if command.all_or_nothing and any(got not in (0, want) for got, want in wanted):
        world.fail(f"{reply} gives a part of what was wanted as a whole")
    world.taken(engine, taken)
    world.seen["taken"] += len(taken)
    world.check()


def _take_held(
    world: MagazineWorld, engine: Engine, command: commands.Exchange, reply: Exchanged
) -> None:
    answers = np.frombuffer(reply.held_blocks, np.int32).tolist()
    is_held = True
    for key, block in zip(split_keys(command.hold_keys), answers, strict=True):
        if block >= 0 and not is_held:
            world.fail("something behind a miss was held")
        is_held = is_held and (block >= 0 or not command.stops_at_miss)
        if block >= 0:
            engine.held[block] = key
        elif is_held and _is_on_device(world, engine, key):
            world.fail("a key is on the device, and was not held")
    blocks = np.frombuffer(reply.held_all_blocks, np.int32).tolist()
    engine.held.update(zip(blocks, split_keys(reply.held_all_keys), strict=True))
    if command.holds_all:
        device = world.records.device
        is_own = (device.state == State.READY) & (device.tenant == engine.tenant)
        if set(blocks) != set(is_own.nonzero()[0].tolist()):
            world.fail(f"of all findable blocks {blocks} were held")
    world.seen["held"] += len(engine.held)


def _is_on_device(world: MagazineWorld, engine: Engine, key: bytes) -> bool:
    return _is_its(world, engine, world.cache._state.device.index.get(key))


def _is_its(world: MagazineWorld, engine: Engine, block: int) -> bool:
    """Tell whether there is such a block, and it belongs to the engine's tenant."""
    return block >= 0 and int(world.records.device.tenant[block]) == engine.tenant


def _command(world: MagazineWorld, engine: Engine, worker: Worker) -> commands.Exchange:
    """Return an exchange of whatever the engine has; it first writes the blocks that it publishes."""
    rng = world.rng
    chain = pick_chain(world, engine.tenant, rng.randint(1, 6))
    publish = _some(world, [*engine.private], rng.choice((0, 0, 2, 4)))
    places = [
        rng.randrange(len(chain)) if rng.random() < 0.3 else at % len(chain)
        for at in range(len(publish))
    ]
    keys = [chain[place] for place in places]
    for block, key in reversed([*zip(publish, keys, strict=True)]):
        if block in engine.private:
            world.device[block] = engine.private[block] = ("key", key, 0)
    wants = rng.random() < 0.6
    tells_positions = has_stores(world) or rng.random() < 0.7
    positions = np.array(places, np.uint32).tobytes() if tells_positions else b""
    return commands.Exchange(
        worker_id=worker.worker_id,
        sequence=engine.sequence + 1,
        publish_blocks=np.array(publish, np.int32).tobytes(),
        publish_keys=b"".join(keys),
        publish_positions=positions,
        retract_blocks=_packed(_some(world, [*engine.held], rng.choice((0, 0, 2)))),
        drop_blocks=_packed(_some(world, sorted(engine.blocks), rng.choice((0, 3, 8)))),
        hold_keys=b"".join(pick_chain(world, engine.tenant, rng.choice((0, 3, 6)))),
        stops_at_miss=rng.random() < 0.5,
        brings=rng.random() < 0.5,
        holds_all=rng.random() < _SHARE_OF_ALL,
        take_running=rng.randint(0, 4) if wants else 0,
        take_new=rng.randint(0, 6) if wants else 0,
        all_or_nothing=rng.random() < 0.3,
    )


def _some(world: MagazineWorld, blocks: list[int], most: int) -> list[int]:
    """Return some of the blocks, and now and then another one, or one twice."""
    rng = world.rng
    chosen = rng.sample(blocks, min(most, len(blocks)))
    if most and rng.random() < _ODD:
        chosen.append(rng.choice((-1, 0, 1_000, rng.randrange(world.shape.num_blocks), *chosen)))
    return chosen


def _packed(blocks: list[int]) -> bytes:
    return np.array(blocks, np.int32).tobytes()


class _Foretold:
    """What an engine has while its exchange is gone through entry by entry, as the protocol prescribes."""

    def __init__(self, world: MagazineWorld, engine: Engine) -> None:
        """Start with what the engine has."""
        self.private, self.held = dict(engine.private), dict(engine.held)
        self._world, self._engine = world, engine
        self._new: set[bytes] = set()

    def published(self, command: commands.Exchange) -> bytes:
        """Return the code for each published block."""
        codes, state = [], self._world.cache._state
        blocks = np.frombuffer(command.publish_blocks, np.int32).tolist()
        named = set()
        for block, key in zip(blocks, split_keys(command.publish_keys), strict=True):
            is_known = key in self._new or state.device.index.get(key) >= 0
            coming = int(state.loading.find(key)[0])
            is_known |= coming >= 0 and not _is_its(self._world, self._engine, coming)
            if block not in self.private or block in named:
                codes.append(3)
            elif is_known:
                codes.append(2)
            else:
                codes.append(1)
                del self.private[block]
                self.held[block] = key
                self._new.add(key)
            named.add(block)
        return bytes(codes)

    def retracted(self, command: commands.Exchange) -> bytes:
        """Return the code for each retracted block."""
        codes, holds = [], self._world.cache._state.device.holds
        named = set()
        for block in np.frombuffer(command.retract_blocks, np.int32).tolist():
            if block not in self.held or block in named:
                codes.append(3)
            elif holds[block] > 1:
                codes.append(2)
            else:
                codes.append(1)
                del self.held[block]
                self.private[block] = self._world.device[block]
            named.add(block)
        return bytes(codes)

    def dropped(self, command: commands.Exchange) -> bytes:
        """Return the code for each dropped block."""
        codes = []
        for block in np.frombuffer(command.drop_blocks, np.int32).tolist():
            is_there = block in self.private or block in self.held
            codes.append(1 if is_there else 3)
            self.private.pop(block, None)
            self.held.pop(block, None)
        return bytes(codes)


Act = Callable[["World"], None]

WORK_OF_MAGAZINES: Final[dict[Act, int]] = {start: 5, exchange: 60, write: 8}
"""What also happens if there are engines."""

FAULTS_OF_MAGAZINES: Final[dict[Act, int]] = {repeat: 4, leave: 2, crash: 5}
"""What also goes wrong if there are engines."""
