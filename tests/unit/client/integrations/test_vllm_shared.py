"""Laws of an engine's books in shared mode: whose a block is, which blocks leave, and what a lost answer does."""

import random
from collections.abc import Iterable

import pytest

from kvlease.integrations.vllm.fence import Fence
from kvlease.integrations.vllm.shared.magazine import Books
from kvlease.integrations.vllm.shared.orders import Order, Standing, Wish
from kvlease.integrations.vllm.shared.pace import Pace, Supply

STAY = Wish(idle_max=100, stock_max=100)


class Desk:
    """Books with their fence, and a daemon that accepts everything."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.fence = Fence()
        self.books = Books(num_blocks, self.fence)

    def fetch(self, *blocks: int) -> None:
        """Receive private blocks."""
        self.settle(
            self.books.order(Wish(num_new=len(blocks), stock_max=100, idle_max=100)), taken=blocks
        )

    def settle(
        self,
        order: Order,
        *,
        code: int = 1,
        held: tuple[int, ...] = (),
        taken: tuple[int, ...] = (),
    ) -> None:
        """Answer every entry alike."""
        self.books.settle(
            order,
            published=[code] * len(order.publish),
            retracted=[1] * len(order.retract),
            held=held,
            taken=taken,
        )

    def use(self, count: int = 1, *, first: int = 0) -> list[int]:
        """Have a request write blocks in a step that has come back."""
        blocks = self.books.grant(count)
        for position, block in enumerate(blocks, first):
            self.books.write(block, b"name %d" % block, position)
        self.fence.came_back(self.fence.dispatch())
        return blocks

    def held(self, *blocks: int) -> None:
        """Hold blocks that another engine published."""
        wish = Wish(names=[b"other %d" % block for block in blocks], idle_max=100, stock_max=100)
        self.settle(self.books.order(wish), held=blocks)


def test_written_block_is_published_only_after_its_step() -> None:
    """A block that a step writes is published once that step has come back, and not before."""
    desk = Desk()
    desk.fetch(5)
    desk.books.write(desk.books.grant(1)[0], b"name", 3)
    step = desk.fence.dispatch()

    assert desk.books.order(STAY).publish == ()

    desk.fence.came_back(step)
    (write,) = desk.books.order(STAY).publish
    assert (write.block_id, write.name, write.position) == (5, b"name", 3)


def test_published_block_is_idle_after_its_last_user_and_never_stock() -> None:
    """A findable block is not handed out again, as others may read it."""
    desk = Desk()
    desk.fetch(5)
    desk.use()
    desk.settle(desk.books.order(STAY))

    assert desk.books.release(5) is False
    assert (desk.books.num_idle, desk.books.num_stock) == (1, 0)
    assert desk.books.standing(5) is Standing.HELD


def test_duplicate_stays_private_and_goes_back_into_the_stock() -> None:
    """A block whose key another block has is private, and is used again without a call."""
    desk = Desk()
    desk.fetch(5)
    desk.use()
    desk.settle(desk.books.order(STAY), code=2)

    assert desk.books.standing(5) is Standing.PRIVATE
    assert desk.books.release(5) is True
    assert desk.books.grant(1) == [5]


def test_block_freed_before_its_step_came_back_waits_to_be_published() -> None:
    """A freed block whose step is not back is neither stock nor idle: it is to be published, not overwritten."""
    desk = Desk()
    desk.fetch(5)
    desk.books.write(desk.books.grant(1)[0], b"name", 0)
    step = desk.fence.dispatch()

    assert desk.books.release(5) is False
    assert repr(desk.books) == "<Books 0 free, 0 used, 0 idle, 1 waiting>"

    desk.fence.came_back(step)
    desk.settle(desk.books.order(STAY))
    assert repr(desk.books) == "<Books 0 free, 0 used, 1 idle, 0 waiting>"


def test_waiting_block_is_published_and_dropped_in_one_where_nothing_may_stay() -> None:
    """Under pressure a freed block is published and dropped in the exchange that asks for other blocks."""
    desk = Desk()
    desk.fetch(5)
    desk.use()
    desk.books.release(5)

    order = desk.books.order(Wish(num_running=1))
    assert ([write.block_id for write in order.publish], order.drop) == ([5], (5,))

    desk.settle(order, taken=(9,))
    assert desk.books.standing(5) is Standing.OUT
    assert desk.books.num_owned == 1


def test_longest_unused_block_leaves_first_and_is_evicted_first() -> None:
    """The longest unused block is dropped last, because the daemon evicts the last dropped block first."""
    desk = Desk()
    desk.held(3, 4, 5, 6)

    order = desk.books.order(Wish(idle_max=1, stock_max=100))

    assert order.drop == (5, 4, 3)
    assert order.forgotten == (3, 4, 5)
    assert desk.books.standing(6) is Standing.HELD


def test_blocks_of_the_request_in_hand_stay() -> None:
    """Blocks that are to be kept do not leave, whatever else does."""
    desk = Desk()
    desk.held(3, 4, 5)

    assert desk.books.order(Wish(kept={4})).drop == (5, 3)


def test_spoilt_block_is_retracted_when_it_was_published() -> None:
    """A block whose bytes are not what its key says is retracted and found no more."""
    desk = Desk()
    desk.fetch(5)
    desk.use()
    desk.settle(desk.books.order(STAY))

    desk.books.spoil(5)
    order = desk.books.order(STAY)
    assert order.retract == (5,)

    desk.settle(order)
    assert desk.books.standing(5) is Standing.PRIVATE


def test_spoilt_block_does_not_leave_before_it_is_retracted() -> None:
    """A block whose bytes differ from its key is never left to others, even where nothing may stay."""
    desk = Desk()
    desk.held(5, 6)
    desk.books.spoil(5)

    order = desk.books.order(Wish())

    assert (order.retract, order.drop) == ((5,), (6,))


@pytest.mark.parametrize(("code", "standing"), [(1, Standing.HELD), (2, Standing.PRIVATE)])
def test_block_that_is_spoilt_while_its_publication_is_sent_is_retracted(
    code: int, standing: Standing
) -> None:
    """Until the answer is heard it is not known whether a key has come to name other bytes."""
    desk = Desk()
    desk.fetch(5)
    desk.use()
    sent = desk.books.order(STAY)
    desk.books.spoil(5)

    assert desk.books.standing(5) is Standing.DOUBTED
    desk.settle(sent, code=code)
    assert desk.books.standing(5) is standing
    assert desk.books.order(STAY).retract == ((5,) if standing == Standing.HELD else ())


def test_block_that_is_freed_while_its_publication_is_sent_waits_for_the_answer() -> None:
    """It may be found again meanwhile, but nobody gets it to write into."""
    desk = Desk()
    desk.fetch(5)
    desk.use()
    sent = desk.books.order(STAY)

    assert desk.books.release(5) is False
    assert repr(desk.books) == "<Books 0 free, 0 used, 0 idle, 1 waiting>"
    desk.settle(sent, code=2)
    assert desk.books.grant(1) == [5]


def test_spoilt_block_is_never_published() -> None:
    """A block whose load failed is not published as if it had been written."""
    desk = Desk()
    desk.fetch(5)
    desk.use()

    desk.books.spoil(5)

    assert desk.books.order(STAY).is_empty


def test_block_of_a_lost_publication_is_not_handed_out() -> None:
    """A block whose publication was lost may be findable, so it keeps its bytes until an inventory."""
    desk = Desk()
    desk.fetch(5)
    desk.use()
    desk.books.doubt(desk.books.order(STAY))

    desk.books.release(5)

    assert desk.books.is_doubtful
    assert desk.books.num_stock == 0
    assert desk.books.give_up() == []


@pytest.mark.parametrize(
    ("is_findable", "standing"), [(True, Standing.HELD), (False, Standing.FREE)]
)
def test_lost_publication_is_not_sent_again_after_a_reset(
    is_findable: bool, standing: Standing
) -> None:
    """A name from before a reset would become a key of after it, under which old bytes would be found."""
    desk = Desk()
    desk.fetch(5)
    desk.use()
    desk.books.doubt(desk.books.order(STAY))
    desk.books.release(5)

    desk.books.outdate()
    desk.books.reconcile({5: is_findable})

    assert desk.books.standing(5) is standing
    assert desk.books.order(STAY).publish == ()


@pytest.mark.parametrize(
    ("is_findable", "standing"), [(True, Standing.HELD), (False, Standing.PRIVATE)]
)
def test_inventory_ends_the_doubt(is_findable: bool, standing: Standing) -> None:
    """The inventory shows whether a publication was carried out; if not, it is sent again."""
    desk = Desk()
    desk.fetch(5)
    desk.use()
    desk.books.doubt(desk.books.order(STAY))

    desk.books.reconcile({5: is_findable})

    assert desk.books.standing(5) is standing
    assert len(desk.books.order(STAY).publish) == (not is_findable)


def test_inventory_brings_blocks_of_lost_answers() -> None:
    """Private blocks of a lost answer become stock; findable blocks whose keys are unknown here are dropped."""
    desk = Desk()
    desk.fetch(5)
    desk.books.doubt(desk.books.order(Wish(num_new=1, stock_max=100)))

    result = desk.books.reconcile({5: False, 7: False, 8: True})

    assert (result.adopted, result.strays) == ((7,), (8,))
    assert desk.books.num_stock == 2
    assert desk.books.order(STAY).drop == (8,)


def test_block_that_is_not_in_the_inventory_is_never_handed_out_again() -> None:
    """A missing block that a request uses is lost when it is freed; one in stock is gone at once."""
    desk = Desk()
    desk.fetch(5, 6)
    used = desk.use()[0]

    result = desk.books.reconcile({})

    assert result.lost == (used,)
    assert desk.books.num_stock == 0
    assert desk.books.release(used) is True
    assert desk.books.num_owned == 0
    assert desk.books.order(STAY).is_empty


def test_order_that_is_not_answered_leaves_nothing_behind() -> None:
    """After a lost answer the blocks to be dropped are not used again before the inventory shows them."""
    desk = Desk()
    desk.held(3)
    order = desk.books.order(Wish())
    desk.books.doubt(order)

    assert desk.books.standing(3) is Standing.OUT

    desk.books.reconcile({3: True})
    assert desk.books.order(STAY).drop == (3,)


def test_without_the_daemon_freed_blocks_are_used_again() -> None:
    """Without the daemon publications are given up, and their blocks become stock."""
    desk = Desk()
    desk.fetch(5)
    desk.use()
    desk.books.release(5)

    assert desk.books.give_up() == [5]
    assert desk.books.grant(1) == [5]
    assert desk.books.order(STAY).is_empty


def test_block_that_a_step_under_way_may_touch_does_not_leave() -> None:
    """A block that is freed during a step may be used again here, but goes to nobody else before the step is back."""
    desk = Desk()
    desk.fetch(5)
    desk.held(3)
    desk.books.reuse(3)
    desk.books.grant(1)
    step = desk.fence.dispatch()
    desk.books.dispatched(step)
    desk.books.release(5)
    desk.books.release(3)

    assert desk.books.order(Wish()).drop == ()

    desk.fence.came_back(step)
    assert set(desk.books.order(Wish()).drop) == {3, 5}


class Pool:
    """A daemon with one magazine, by its protocol: a block outside the magazine may belong to anybody."""

    def __init__(self, num_blocks: int, chance: random.Random) -> None:
        self.free = set(range(1, num_blocks))
        self.private: set[int] = set()
        self.ready: dict[int, bytes] = {}
        self.held: set[int] = set()
        self._chance = chance

    def carry_out(self, order: Order) -> dict[str, list[int]]:
        """Publish, drop, hold and take blocks."""
        published = []
        for write in order.publish:
            assert write.block_id in self.private
            if write.name in self.ready.values():
                published.append(2)
                continue
            self.private.remove(write.block_id)
            self.ready[write.block_id] = write.name
            self.held.add(write.block_id)
            published.append(1)
        for block in order.retract:
            assert block in self.held
            self.held.remove(block)
            del self.ready[block]
            self.private.add(block)
        for block in order.drop:
            self.held.discard(block)
            if block in self.private:
                self.private.remove(block)
                self.free.add(block)
        found = {name: block for block, name in self.ready.items()}
        held = [found.get(name, -1) for name in order.wish.names]
        self.held |= set(held) - {-1}
        wanted = order.wish.num_new
        for block in [b for b in self.ready if b not in self.held]:
            if len(self.free) < wanted:
                del self.ready[block]
                self.free.add(block)
        taken = self._chance.sample(sorted(self.free), min(wanted, len(self.free)))
        self.free -= set(taken)
        self.private |= set(taken)
        return {
            "published": published,
            "retracted": [1] * len(order.retract),
            "held": held,
            "taken": taken,
        }

    def inventory(self) -> dict[int, bool]:
        """Return the true inventory."""
        return {**dict.fromkeys(self.private, False), **dict.fromkeys(self.held, True)}


class Life:
    """An engine that uses blocks of a pool; answers may come at once, later or never."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311
        self.desk, self.pool = Desk(24), Pool(24, self.chance)
        self.books = self.desk.books
        self.used: list[int] = []
        self.found: set[int] = set()
        """Blocks that the engine can find, because their names are not forgotten."""
        self.spoilt: set[int] = set()
        self.strays: set[int] = set()
        self.underway: tuple[Order, dict[str, list[int]] | None] | None = None
        self.num_names = 0

    def act(self) -> None:
        """Do one thing of those that are possible."""
        match self.chance.randrange(9):
            case 0 | 1:
                self.grant()
            case 2 if self.used:
                self.release(self.used.pop(self.chance.randrange(len(self.used))))
            case 3:
                self.books.dispatched(step := self.desk.fence.dispatch())
                self.desk.fence.came_back(step - self.chance.randrange(2))
            case 4 if unused := sorted(self.found.difference(self.used)):
                self.books.reuse(reused := self.chance.choice(unused))
                self.used.append(reused)
            case 5 if self.found and not self.chance.randrange(3):
                self.spoil(self.chance.choice(sorted(self.found)))
            case _ if self.underway:
                self.hear()
            case _ if self.books.is_doubtful:
                self.reconcile()
            case _:
                self.send()
                if self.chance.randrange(2):
                    self.hear()

    def grant(self) -> None:
        """Hand out blocks to requests, which write some of them."""
        for block in self.books.grant(min(self.books.num_stock, self.chance.randrange(4))):
            assert block in self.pool.private
            self.used.append(block)
            self.num_names += self.chance.randrange(2)
            self.books.write(block, b"%d" % (self.num_names % 40), 0)
            self.found.add(block)

    def release(self, block: int) -> None:
        """Free a block."""
        if self.books.release(block):
            self.found.discard(block)

    def spoil(self, block: int) -> None:
        """Have a name no longer match its bytes."""
        self.books.spoil(block)
        self.found.discard(block)
        self.spoilt.add(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Find blocks no more."""
        self.found.difference_update(blocks)

    def send(self) -> None:
        """Send an exchange."""
        choice = self.chance.choice
        wish = Wish(
            names=[b"%d" % self.chance.randrange(40) for _ in range(self.chance.randrange(3))],
            num_new=self.chance.randrange(4),
            idle_max=choice([0, 2, 9]),
            stock_max=choice([0, 4, 9]),
        )
        order = self.books.order(wish)
        self.forget(order.forgotten)
        self.strays = set()
        assert not self.spoilt & {write.block_id for write in order.publish}
        is_lost = self.chance.random() < 0.2
        is_carried_out = not is_lost or self.chance.random() < 0.5
        answer = self.pool.carry_out(order) if is_carried_out else {}
        self.underway = order, None if is_lost else answer

    def hear(self) -> None:
        """Hear its answer, or that there is none."""
        assert self.underway is not None
        (order, answer), self.underway = self.underway, None
        if answer is None:
            self.books.doubt(order)
            return
        settled = self.books.settle(order, **answer)
        self.forget(settled.forgotten)
        self.found |= {block for _, block in settled.held}

    def reconcile(self) -> None:
        """Compare the books with the inventory."""
        told = self.books.reconcile(self.pool.inventory())
        self.forget(told.forgotten)
        self.strays = set(told.strays)

    def check(self) -> None:
        """What requests use is this engine's, and after an answer the books are the pool's."""
        self.spoilt -= self.pool.private
        for block in self.used:
            assert block in self.pool.private or block in self.pool.held
        if self.underway is not None or self.books.is_doubtful:
            return
        for block in range(1, 24):
            standing = self.books.standing(block)
            is_private = standing in {Standing.FREE, Standing.PRIVATE}
            assert is_private == (block in self.pool.private)
            assert (standing == Standing.HELD) == (block in self.pool.held - self.strays)


@pytest.mark.parametrize("seed", range(100))
def test_random_lives_never_write_what_others_read(seed: int) -> None:
    """Every block that is handed out is private in the daemon, whatever the order of steps, losses and exchanges."""
    life = Life(seed)
    for _ in range(400):
        life.act()
        life.check()

    while life.underway or life.books.is_doubtful or life.spoilt & life.pool.held:
        life.act()
    assert not life.spoilt & life.pool.ready.keys()
    life.books.reconcile(life.pool.inventory())
    assert life.books.num_owned + len(
        life.books.order(Wish(idle_max=99, stock_max=99)).drop
    ) == len(life.pool.inventory())


def test_one_call_a_step_and_a_few_in_advance() -> None:
    """Over any time there are no more calls than steps, except for the saved-up calls."""
    pace = Pace(calls_banked_max=2)
    calls = 0
    for _ in range(100):
        while pace.may_call:
            pace.spend()
            calls += 1
        pace.step()

    assert calls == 101


def test_pressing_calls_are_paid_back() -> None:
    """An urgent call may be made in advance, and later calls wait for it."""
    pace = Pace(calls_banked_max=2)
    while pace.may_press:
        pace.spend()

    for _ in range(2):
        pace.step()
        assert not pace.may_call
    pace.step()
    assert pace.may_call


@pytest.mark.parametrize(
    ("num_available", "num_magazines", "refill"),
    [(1000, 1, 12), (40, 1, 10), (40, 2, 5), (0, 1, 0)],
)
def test_refill_is_a_small_part_of_what_is_there(
    num_available: int, num_magazines: int, refill: int
) -> None:
    """An engine fills up its stock, but never takes much of what is scarce."""
    supply = Supply(num_blocks=100, stock_wanted=16, longest_blocks=20)

    assert supply.refill(supply.stock_wanted, 4, num_available, num_magazines) == refill


@pytest.mark.parametrize("longest_blocks", [1, 500, 999, 1000, 2000])
def test_engines_at_rest_leave_room_for_the_longest_request(longest_blocks: int) -> None:
    """Eight idle engines keep so little that the longest request of a ninth engine still has room."""
    supply = Supply(num_blocks=1001, stock_wanted=64, longest_blocks=longest_blocks)

    at_rest = 8 * (supply.idle_max + supply.rest_max)

    assert at_rest <= max(0, 1000 - longest_blocks)


def test_isolated_books_have_every_block_but_the_null_one() -> None:
    """Others' blocks become stock, used ones stay with their requests, and held ones are findable until evicted."""
    desk = Desk(8)
    desk.fetch(1, 2, 3)
    desk.held(6)
    used, written = desk.books.grant(1), desk.use()
    desk.books.doubt(desk.books.order(STAY))

    forgotten = desk.books.isolate()

    assert (used, written, forgotten) == ([3], [2], [])
    assert desk.books.standing(0) == Standing.OUT
    assert [desk.books.standing(block) for block in (*used, *written)] == [Standing.PRIVATE] * 2
    assert (desk.books.num_owned, desk.books.num_stock, desk.books.num_idle) == (7, 4, 1)
    assert not desk.books.is_doubtful
    assert desk.books.evict(9, kept={6}) == []
    assert desk.books.evict(9, kept=()) == [6]
    assert desk.books.num_stock == 5


def test_block_that_is_named_in_isolated_books_stays_found() -> None:
    """In isolated books a key needs no publication, and a block whose bytes differ from its key is stock at once."""
    desk = Desk(8)
    desk.books.isolate()
    one, two = desk.use(2)

    assert desk.books.order(STAY).is_empty
    assert (desk.books.release(one), desk.books.num_idle) == (False, 1)
    desk.books.spoil(one)
    desk.books.spoil(two)
    assert desk.books.num_idle == 0
    assert desk.books.release(two) is True
    assert desk.books.num_stock == 7


def test_block_that_was_to_be_retracted_is_not_found_in_isolated_books() -> None:
    """A key that no longer tells a block's bytes does not come back with the memory."""
    desk = Desk(8)
    desk.held(5, 6)
    desk.books.reuse(5)
    desk.books.spoil(5)
    desk.books.spoil(6)

    assert desk.books.isolate() == [6]
    assert desk.books.standing(5) == Standing.PRIVATE
    assert desk.books.release(5) is True
