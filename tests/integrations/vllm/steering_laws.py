"""Own the laws of the shared scheduler that no engine shows on its own; runs with the reference engine's Python.

`steering_laws.py LAW`: the law is the name of a function below, which raises if the law does not hold.
"""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvlease.integrations.vllm.fence import Fence
from kvlease.integrations.vllm.identity.rekey import Rekeyer
from kvlease.integrations.vllm.session.guard import Guard
from kvlease.integrations.vllm.shared.dealing import Dealer
from kvlease.integrations.vllm.shared.magazine import Books
from kvlease.integrations.vllm.shared.pace import Supply
from kvlease.integrations.vllm.shared.pool import SharedBlockPool
from kvlease.integrations.vllm.shared.steering import Steering
from kvlease.magazine import Exchanged, ExchangeOrder
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

_NUM_BLOCKS = 65
_STOCK = 8
_DUPLICATE = 2


class Session:
    """A daemon that gives all that is asked of it; what is begun is answered only when it is heard."""

    def __init__(self) -> None:
        self.guard = Guard(deadline_seconds=1, retry_seconds=1)
        self.rekeyer = Rekeyer(bytes(32), bytes(32))
        self.is_on, self.needs_inventory = True, False
        self.waited_for: list[ExchangeOrder] = []
        self.code = 1
        self._begun: list[ExchangeOrder] = []
        self._free = list(range(1, _NUM_BLOCKS))

    def exchange(self, order: ExchangeOrder, _default: None) -> Exchanged:
        """Answer at once."""
        self.waited_for.append(order)
        return self._answer(order)

    def begin(self, order: ExchangeOrder) -> bool:
        """Take an order."""
        self._begun.append(order)
        return True

    def answered(self) -> Exchanged:
        """Answer the order that was begun."""
        return self._answer(self._begun.pop())

    def _answer(self, order: ExchangeOrder) -> Exchanged:
        running, new = (
            [self._free.pop() for _ in range(count)]
            for count in (order.take_running, order.take_new)
        )
        published = [self.code] * len(np.asarray(order.publish_blocks))
        return Exchanged(
            published=np.array(published, np.uint8),
            retracted=np.array([], np.uint8),
            dropped=np.array([], np.uint8),
            held=np.array([], np.int32),
            held_all_blocks=np.array([], np.int32),
            held_all_keys=b"",
            taken_running=np.array(running, np.int32),
            taken_new=np.array(new, np.int32),
            num_available=len(self._free),
            num_magazines=1,
        )


class Bench:
    """A steering over a small pool; `needs` is how many blocks the next request takes."""

    def __init__(self) -> None:
        self.session, self.fence, self.needs = Session(), Fence(), 0
        self.books = Books(_NUM_BLOCKS, self.fence)
        self.pool = SharedBlockPool.share(
            BlockPool(_NUM_BLOCKS, enable_caching=True, hash_block_size=32),
            self.books,
            lambda: None,
        )
        coordinator: Any = SimpleNamespace(
            find_longest_cache_hit=lambda *_: None,
            get_num_blocks_to_allocate=lambda *_, **__: self.needs,
            single_type_managers=[
                SimpleNamespace(
                    num_cached_block={"runs": 0},
                    block_size=32,
                    kv_cache_spec=SimpleNamespace(prefix_cacheable=True),
                )
            ],
        )
        session: Any = self.session
        dealer = Dealer(session, self.books, self.pool.forget, ())
        supply = Supply(num_blocks=_NUM_BLOCKS, stock_wanted=_STOCK, longest_blocks=16)
        self.steering = Steering(coordinator, self.pool, dealer, supply, "laws")
        self.steering.stock_up()
        self.session.waited_for.clear()

    def step(self, *, num_active: int = 1) -> None:
        """End a step, which does not come back yet."""
        self.steering.end_step(num_active)
        self.books.dispatched(self.fence.dispatch())

    def ask(self, request: str, needs: int, *hits: Any) -> bool:
        """Count the blocks that a request needs; return whether vLLM would hand them out."""
        self.needs = needs
        total = self.steering.count(request, 32 * needs, (list(hits),))
        return total <= self.pool.get_num_free_blocks()


def blocks_that_are_under_way_are_not_asked_for_again() -> None:
    """A request that lacks blocks gets those that an earlier step fetched, if steps are scheduled ahead."""
    for request in ("runs", "new"):
        bench = Bench()
        bench.pool.get_new_blocks(bench.books.num_stock)
        bench.step()

        assert bench.ask(request, 3)
        assert bench.session.waited_for == []
        assert bench.books.num_stock == _STOCK


def hits_that_turn_out_to_be_duplicates_are_not_used() -> None:
    """A freed block whose publication is under way is found until the answer takes its name away."""
    bench = Bench()
    bench.session.code = _DUPLICATE
    (block,) = bench.pool.get_new_blocks(1)
    name = make_block_hash_with_group_id(BlockHash(bytes(32)), 0)
    block.set_block_hash(name, num_tokens=32)
    bench.pool.cached_block_hash_to_block.insert(name, block)
    bench.books.write(block.block_id, name, 0)
    for _ in range(5):
        bench.step()
        bench.fence.came_back(bench.fence.dispatch())
    bench.pool.free_blocks([block])
    bench.pool.get_new_blocks(bench.books.num_stock)

    assert bench.pool.cached_block_hash_to_block.get_one_block(name) is block
    assert not bench.ask("new", 3, block)
    assert bench.pool.cached_block_hash_to_block.get_one_block(name) is None


def requests_that_have_loaded_are_not_refused_for_an_old_answer() -> None:
    """A request that holds loaded blocks is admitted, though few were available when the daemon last answered."""
    bench = Bench()
    bench.needs = 2 * _STOCK
    bench.pool.num_elsewhere = 0

    total = bench.steering.count("runs", 512, ((),), apply_admission_cap=True)

    assert total <= bench.pool.get_num_free_blocks()
    assert len(bench.session.waited_for) == 1


def main() -> None:
    """Put one law to the test."""
    laws = {
        one.__name__: one
        for one in (
            blocks_that_are_under_way_are_not_asked_for_again,
            hits_that_turn_out_to_be_duplicates_are_not_used,
            requests_that_have_loaded_are_not_refused_for_an_old_answer,
        )
    }
    laws[sys.argv[1]]()


if __name__ == "__main__":
    main()
