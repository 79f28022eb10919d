"""Own the law of owned memory: whenever the engine dies, each findable block holds what its key says.

A small engine and a small daemon play against each other with lost answers; the keeper is the real one.
"""

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvlease.exchanges import Exchanged, ExchangeOrder, Inventory
from kvlease.integrations.vllm.fence import Fence, Standing
from kvlease.integrations.vllm.owned import keeper as keeper_module
from kvlease.integrations.vllm.owned.keeper import Keeper
from kvlease.integrations.vllm.owned.terms import Needs, Persistence

NUM_BLOCKS = 17
NEEDS = Needs(blocks_per_request=3, reserve_blocks=2)
NOTHING = np.zeros(0, np.int32)


def chance_of(seed: object) -> random.Random:
    """Return a random generator that is the same for the same seed."""
    return random.Random(str(seed))  # noqa: S311 - nothing is secret


def key_of(name: bytes) -> bytes:
    """Return the key of a name."""
    return name.ljust(32, b"k")


@dataclass
class PlayedDaemon:
    """A magazine of one engine whose answers may get lost."""

    chance: random.Random
    num_blocks: int = NUM_BLOCKS
    key_of: dict[int, bytes] = field(default_factory=dict)
    is_lossy: bool = False
    is_answering: bool = True
    is_dead: bool = False
    refused: set[int] = field(default_factory=set)
    sequence: int = 0
    underway: ExchangeOrder | Exchanged | None = None

    @property
    def is_returning(self) -> bool:
        """Tell whether the daemon answers."""
        return self.is_answering

    def exchange(self, order: ExchangeOrder) -> Exchanged | None:
        """Carry out an exchange, all of it or half."""
        fate = self.chance.random() if self.is_lossy else 1.0
        if fate < 0.15:
            return None
        published = [
            self._publish(int(block), order.publish_keys[32 * at : 32 * at + 32])
            for at, block in enumerate(np.asarray(order.publish_blocks))
        ]
        retracted = [self._retract(int(block)) for block in np.asarray(order.retract_blocks)]
        self.sequence += 1
        if fate < 0.3:
            return None
        return Exchanged(
            published=np.array(published, np.uint8),
            retracted=np.array(retracted, np.uint8),
            dropped=np.zeros(0, np.uint8),
            held=NOTHING,
            held_all_blocks=NOTHING,
            held_all_keys=b"",
            taken_running=NOTHING,
            taken_new=NOTHING,
            num_available=0,
            num_magazines=1,
        )

    def begin(self, order: ExchangeOrder) -> bool:
        """Take an exchange, and carry it out now or only when its answer is asked for."""
        if self.is_lossy and self.chance.random() < 0.05:
            return False
        self.underway = order if self.chance.random() < 0.5 else self.exchange(order)
        return True

    def answered(self) -> Exchanged | None:
        """Answer the exchange that was begun."""
        underway, self.underway = self.underway, None
        return self.exchange(underway) if isinstance(underway, ExchangeOrder) else underway

    def inventory(self) -> Inventory | None:
        """Return the inventory, if the daemon answers at all."""
        if self.is_lossy and self.chance.random() < 0.3:
            return None
        keys = [self.key_of.get(block, bytes(32)) for block in range(1, self.num_blocks)]
        blocks = np.arange(1, self.num_blocks, dtype=np.int32)
        return Inventory(blocks=blocks, keys=b"".join(keys), sequence=self.sequence)

    def _publish(self, block: int, key: bytes) -> int:
        if block in self.key_of:
            return 3
        if key in self.key_of.values():
            return 2
        self.key_of[block] = key
        return 1

    def _retract(self, block: int) -> int:
        if block in self.refused:
            return 2
        return 1 if self.key_of.pop(block, None) is not None else 3


class PlayedEngine:
    """An engine with a pool of blocks in eviction order, requests that hold some, and steps that are under way."""

    def __init__(self, daemon: PlayedDaemon, num_in_flight: int) -> None:
        self.daemon = daemon
        self.keeper = Keeper(daemon.num_blocks, NEEDS, daemon, lambda names: [*map(key_of, names)])
        self.free = list(range(1, daemon.num_blocks))
        self.contents: dict[int, bytes] = {}
        self.index: dict[bytes, int] = {}
        self.names: dict[int, bytes] = {}
        self.requests: list[list[int]] = []
        self.steps: list[tuple[int, list[tuple[int, bytes]]]] = []
        self._num_in_flight = num_in_flight
        self._writes: list[tuple[int, bytes]] = []
        self.was_gone = False
        """Whether blocks may have been overwritten while nobody could find them."""
        self.keeper.watch(lambda block: block in self.free, lambda: iter(self.free))

    def restore(self) -> None:
        """Begin with what an earlier life left behind."""
        inventory = self.daemon.inventory()
        assert inventory is not None
        keys = [inventory.keys[at : at + 32] for at in range(0, len(inventory.keys), 32)]
        self.keeper.restore(inventory.blocks.tolist(), keys)

    def begin(self, names: list[bytes]) -> bool:
        """Admit a request that hits what is cached and computes the rest; return whether there is room."""
        hits = []
        for name in names:
            block = self.index.get(name)
            if block is None and self.keeper.has_restored:
                block = self.keeper.find_restored(name)
                if block is not None:
                    self.index[name], self.names[block] = block, name
            if block is None:
                break
            hits.append(block)
        num_new = len(names) - len(hits)
        num_idle = sum(block in self.free for block in hits)
        if num_new + num_idle > self.keeper.num_free(len(self.free)):
            return False
        for block in hits:
            is_pending = any(block == one for step in self._under_way for one, _ in step)
            assert is_pending or self.contents[block] == self.names[block], "a hit is what it says"
            if block in self.free:
                self.free.remove(block)
            self.keeper.touched(block)
        self.requests.append([*hits, *self._take(names[len(hits) :], len(hits))])
        return True

    def _take(self, names: list[bytes], first: int) -> list[int]:
        assert self.keeper.require(len(names)), "what was promised is there"
        blocks = self.keeper.pick(len(names))
        assert len(blocks) == len(set(blocks)) == len(names)
        for block in blocks:
            self.free.remove(block)
            old = self.names.pop(block, None)
            if old is not None and self.index.get(old) == block:
                del self.index[old]
        self.keeper.gave(blocks)
        for position, (block, name) in enumerate(zip(blocks, names, strict=True), first):
            self.index.setdefault(name, block)
            self.names[block] = name
            self.keeper.note(block, name, position)
            self._writes.append((block, name))
        return blocks

    @property
    def _under_way(self) -> list[list[tuple[int, bytes]]]:
        return [self._writes, *(writes for _, writes in self.steps)]

    def dispatch(self) -> None:
        """Send out a step."""
        self.steps.append((self.keeper.fence.dispatch(), self._writes))
        self._writes = []

    def finish_step(self) -> None:
        """Have the oldest step write its blocks and come back."""
        step_id, writes = self.steps.pop(0)
        for block, name in writes:
            self.contents[block] = name
        self.keeper.came_back(step_id)

    def finish_request(self, chance: random.Random) -> None:
        """End any one request."""
        for block in reversed(self.requests.pop(chance.randrange(len(self.requests)))):
            if not any(block in request for request in self.requests):
                self.free.append(block)
                self.keeper.refile(block)

    def act(self, chance: random.Random) -> None:
        """Do one of the things that an engine does."""
        act = chance.random()
        if act < 0.45:
            family = chance.randrange(6)
            self.begin([f"{family}.{at}".encode() for at in range(chance.randint(1, 3))])
        elif act < 0.6 and self.requests:
            self.finish_request(chance)
        elif act < 0.63 and self.names:
            self.evict(chance.choice(sorted(self.names)))
        else:
            self.dispatch()
            # What is being written means nothing until its step has run; at worst the block is torn.
            for block, _ in self.steps[-1][1]:
                self.contents[block] = b"torn"
            while len(self.steps) > self._num_in_flight or (self.steps and chance.random() < 0.5):
                self.finish_step()

    def evict(self, block: int) -> None:
        """Forget a block, as after a failed load."""
        name = self.names.pop(block)
        if self.index.get(name) == block:
            del self.index[name]
        self.keeper.evicted(block)


def assert_findable_blocks_hold_their_keys(engine: PlayedEngine) -> None:
    """Assert that every findable block holds what its key says."""
    is_gone = engine.keeper.persistence is Persistence.GONE
    overwritten = engine.keeper.ledger.stale if is_gone or engine.was_gone else ()
    for block, key in engine.daemon.key_of.items():
        name = engine.contents.get(block, b"")
        assert key_of(name) == key or block in overwritten, (block, key, name)


@pytest.mark.parametrize("num_in_flight", [0, 1, 2])
@pytest.mark.parametrize("is_lossy", [False, True], ids=["sure", "lossy"])
@pytest.mark.parametrize("num_blocks", [8, NUM_BLOCKS], ids=["scarce", "enough"])
@pytest.mark.parametrize("seed", range(12))
def test_engine_may_die_at_any_moment(
    seed: int, num_blocks: int, is_lossy: bool, num_in_flight: int
) -> None:
    """After every act each findable block holds what its key says, and the next life can begin with those blocks."""
    chance = chance_of(f"{seed} {is_lossy} {num_in_flight}")
    daemon = PlayedDaemon(chance, num_blocks)
    contents: dict[int, bytes] = {}
    for _ in range(4):
        daemon.is_lossy = False
        engine = PlayedEngine(daemon, num_in_flight)
        engine.contents = contents
        engine.restore()
        daemon.is_lossy = is_lossy
        for _ in range(60):
            daemon.is_answering = not is_lossy or chance.random() < 0.9
            daemon.refused = {chance.randrange(1, num_blocks)} if chance.random() < 0.1 else set()
            engine.act(chance)
            # A block that its engine evicted for a reason of its own still has its bytes.
            assert_findable_blocks_hold_their_keys(engine)
        contents = engine.contents


class HastyFence(Fence):
    """A fence that takes everything for written as soon as it is scheduled."""

    def note(self, block_id: int, name: bytes, position: int = 0) -> None:
        """Note the write as done."""
        self.note_written(block_id, name, position)


def test_law_breaks_without_the_fence() -> None:
    """A keeper that publishes what is only scheduled leaves blocks that do not hold what their keys say."""
    daemon = PlayedDaemon(chance_of(0))
    engine = PlayedEngine(daemon, 1)
    engine.restore()
    engine.keeper.fence = HastyFence()
    engine.begin([b"a", b"b"])

    engine.keeper.exchange(0)

    with pytest.raises(AssertionError):
        assert_findable_blocks_hold_their_keys(engine)


def test_engine_goes_on_with_private_blocks_while_nothing_is_answered() -> None:
    """Findable blocks are not handed out, and the blocks that requests give back are used again."""
    daemon = PlayedDaemon(chance_of(0))
    engine = warm(daemon, num_blocks=13)
    daemon.is_answering = False
    before = dict(daemon.key_of)

    for turn in range(20):
        assert engine.begin([f"new {turn}.{at}".encode() for at in range(3)])
        engine.dispatch()
        engine.finish_step()
        engine.finish_request(chance_of(turn))

    assert daemon.key_of == before
    assert_findable_blocks_hold_their_keys(engine)


def test_request_that_would_overwrite_findable_blocks_waits() -> None:
    """While the daemon is silent, the pool does not report findable blocks as free, so the request waits."""
    daemon = PlayedDaemon(chance_of(0))
    engine = warm(daemon, num_blocks=13)
    daemon.is_answering = False

    assert engine.begin([f"first {at}".encode() for at in range(3)])
    assert not engine.begin([f"second {at}".encode() for at in range(3)])

    daemon.is_answering = True
    assert engine.begin([f"second {at}".encode() for at in range(3)])
    assert_findable_blocks_hold_their_keys(engine)


def test_everything_is_used_while_the_daemon_is_dead() -> None:
    """Without a daemon nothing is found; if one is back over the memory, overwritten blocks are retracted first."""
    daemon = PlayedDaemon(chance_of(0))
    engine = warm(daemon, num_blocks=13)
    daemon.is_answering, daemon.is_dead = False, True
    engine.dispatch()
    engine.finish_step()
    assert engine.keeper.persistence is Persistence.GONE

    for turn in range(5):
        assert engine.begin([f"new {turn}.{at}".encode() for at in range(3)])
    engine.dispatch()
    engine.finish_step()
    daemon.is_answering, daemon.is_dead = True, False
    for _ in range(2):
        engine.dispatch()
        engine.finish_step()

    assert engine.keeper.persistence is Persistence.ON
    assert_findable_blocks_hold_their_keys(engine)
    assert not engine.keeper.ledger.stale


def test_reset_retracts_everything() -> None:
    """After a reset the next life finds nothing."""
    daemon = PlayedDaemon(chance_of(0))
    engine = warm(daemon, num_blocks=13)
    assert daemon.key_of

    engine.keeper.reset()

    assert daemon.key_of == {}


def test_keeper_that_publishes_nothing_still_retracts() -> None:
    """Where only some ranks have the memory, what an earlier life left there is retracted and not found any more."""
    daemon = PlayedDaemon(chance_of(0))
    warm(daemon, num_blocks=13)
    engine = PlayedEngine(daemon, 0)
    engine.keeper.publishes = False
    engine.restore()
    engine.keeper.reset()
    assert daemon.key_of == {}

    engine.begin([b"a", b"b"])
    engine.dispatch()
    engine.finish_step()

    assert daemon.key_of == {}
    assert not engine.keeper.has_work


def test_idle_keeper_asks_for_nothing() -> None:
    """An engine without news makes no calls and needs no empty steps."""
    daemon = PlayedDaemon(chance_of(0))
    engine = warm(daemon, num_blocks=6)
    sequence = daemon.sequence

    for _ in range(5):
        engine.dispatch()
        engine.finish_step()

    assert daemon.sequence == sequence
    assert not engine.keeper.has_work


def test_silent_daemon_has_no_more_promised_than_a_whole_request_needs() -> None:
    """While the daemon is silent, all free blocks are promised only if the private ones suffice for a whole request."""
    daemon = PlayedDaemon(chance_of(0))
    engine = warm(daemon, num_blocks=13)
    keeper, num_free = engine.keeper, len(engine.free)
    daemon.is_answering = False
    num_private = keeper.num_private_free
    assert NEEDS.blocks_per_request <= num_private < num_free
    assert keeper.num_free(num_free) == num_free

    keeper._needs = replace(NEEDS, longest_blocks=num_private + 1)

    assert keeper.num_free(num_free) == num_private


def test_request_of_more_blocks_than_an_exchange_retracts_gets_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where one exchange does not make enough blocks private, the next one makes more."""
    daemon = PlayedDaemon(chance_of(0))
    engine = warm(daemon, num_blocks=13)
    monkeypatch.setattr(keeper_module, "ENTRIES_MAX", 4)
    num_free = len(engine.free)
    engine.keeper._needs = replace(NEEDS, longest_blocks=num_free)
    assert engine.keeper.num_private_free < num_free - 4

    assert engine.keeper.num_free(num_free) == num_free

    assert engine.keeper.num_private_free == num_free


def test_switched_off_keeper_calls_nobody() -> None:
    """A keeper that is switched off makes no calls, because its memory is not the daemon's any more."""
    daemon = PlayedDaemon(chance_of(0))
    engine = warm(daemon, num_blocks=6)
    engine.keeper.switch_off()
    before = dict(daemon.key_of)

    assert not engine.keeper.exchange(9)
    assert not engine.keeper.is_on
    assert daemon.key_of == before


def warm(daemon: PlayedDaemon, num_blocks: int) -> PlayedEngine:
    """Return an idle engine that has published so many blocks."""
    engine = PlayedEngine(daemon, 0)
    engine.restore()
    for first in range(0, num_blocks, 3):
        assert engine.begin([f"w{first}.{at}".encode() for at in range(min(3, num_blocks - first))])
        engine.dispatch()
        engine.finish_step()
        engine.finish_request(chance_of(0))
    for _ in range(2):
        engine.dispatch()
        engine.finish_step()
    return engine


def test_steps_without_news_make_no_exchange() -> None:
    """A step that wrote no whole block makes no exchange while the stock is full."""
    daemon = PlayedDaemon(chance_of(0))
    engine = warm(daemon, num_blocks=13)
    engine.dispatch()
    engine.finish_step()
    before = daemon.sequence

    for _ in range(5):
        engine.dispatch()
        engine.finish_step()

    assert daemon.sequence == before


def written(engine: PlayedEngine, *names: bytes) -> list[int]:
    """Have a step write blocks and come back, so that their publish is on its way; return the blocks."""
    assert engine.begin([*names])
    engine.dispatch()
    engine.finish_step()
    return engine.requests[-1]


def step(engine: PlayedEngine) -> None:
    """Have an empty step come back."""
    engine.dispatch()
    engine.finish_step()


@pytest.fixture
def cold() -> PlayedEngine:
    """Return an engine whose pool holds nothing yet."""
    engine = PlayedEngine(PlayedDaemon(chance_of(0)), num_in_flight=0)
    engine.restore()
    return engine


def test_answer_is_taken_when_the_next_step_comes_back(cold: PlayedEngine) -> None:
    """Until then a written block may neither be handed out nor counts as found; an idle engine has that to do."""
    (block,) = written(cold, b"a")
    cold.finish_request(chance_of(0))

    assert cold.keeper.has_work
    assert block not in cold.keeper.spare | cold.keeper.waiting
    assert cold.keeper.ledger[block] is Standing.DOUBTFUL

    step(cold)

    assert not cold.keeper.has_work
    assert cold.keeper.ledger[block] is Standing.FINDABLE
    assert cold.daemon.key_of == {block: key_of(b"a")}


def test_block_whose_request_ended_is_not_handed_out_while_its_publish_is_on_its_way() -> None:
    """Its request ended before the step that wrote it came back; the daemon may find it from then on."""
    engine = PlayedEngine(PlayedDaemon(chance_of(0)), num_in_flight=1)
    engine.restore()
    assert engine.begin([b"a"])
    engine.dispatch()
    (block,) = engine.requests[0]
    engine.finish_request(chance_of(0))
    assert block in engine.keeper.waiting
    engine.finish_step()

    assert block not in engine.keeper.spare | engine.keeper.waiting
    assert engine.keeper.num_private_free == NUM_BLOCKS - 2


def test_block_that_is_evicted_while_its_publish_is_on_its_way_is_retracted(
    cold: PlayedEngine,
) -> None:
    """The daemon finds it by then, so the next exchange takes it back."""
    (block,) = written(cold, b"a")
    cold.evict(block)
    step(cold)
    step(cold)

    assert cold.daemon.key_of == {}
    assert cold.keeper.ledger.is_private(block)


def test_block_that_is_used_again_while_its_retract_is_on_its_way_is_published_again() -> None:
    """The retract was to make it spare, and it is not: its bytes are still worth finding."""
    daemon = PlayedDaemon(chance_of(0))
    engine = warm(daemon, num_blocks=13)
    written(engine, b"a", b"b", b"c")
    retracted = [block for block in engine.free if engine.keeper.ledger[block] is Standing.DOUBTFUL]
    used = [engine.names[block] for block in retracted]

    assert used
    assert engine.begin(used[:1])
    assert retracted[0] not in daemon.key_of or daemon.underway is not None
    step(engine)
    step(engine)

    assert daemon.key_of[retracted[0]] == key_of(used[0])


def test_reset_takes_back_what_is_on_its_way(cold: PlayedEngine) -> None:
    """A publish that was sent before the reset is found after it, and must not be."""
    written(cold, b"a")
    cold.finish_request(chance_of(0))
    cold.keeper.reset()

    assert cold.daemon.key_of == {}
    assert len(cold.keeper.spare) == NUM_BLOCKS - 1


def test_reset_takes_back_what_was_published_without_an_answer(cold: PlayedEngine) -> None:
    """Whether the daemon finds it is only known from the inventory, and then it must not be found."""
    (block,) = written(cold, b"a")
    cold.finish_request(chance_of(0))
    cold.daemon.underway, cold.daemon.key_of[block] = None, key_of(b"a")
    cold.keeper.reset()

    assert cold.daemon.key_of == {}
    assert len(cold.keeper.spare) == NUM_BLOCKS - 1


def test_lost_answer_is_followed_by_an_inventory(cold: PlayedEngine) -> None:
    """What was on its way is known again once the daemon has told what the magazine has."""
    (block,) = written(cold, b"a")
    cold.daemon.underway = None
    step(cold)
    assert cold.keeper.ledger[block] is Standing.DOUBTFUL

    step(cold)
    step(cold)

    assert cold.keeper.ledger[block] is Standing.FINDABLE
    assert not cold.keeper.has_work
