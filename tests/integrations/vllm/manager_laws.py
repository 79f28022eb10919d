"""Own the laws of the offloading manager that no engine shows on its own; runs with the reference engine's Python.

`manager_laws.py ADDRESS LAW`: the law is the name of a function below, which raises if the law does not hold.
"""

import sys
import time
from typing import Any

from kvlease import Client
from kvlease.integrations.vllm.identity.namespace import FIELDS, Identity
from kvlease.integrations.vllm.offload import desk as desks
from kvlease.integrations.vllm.offload import manager as managing
from kvlease.integrations.vllm.offload.desk import Desk
from kvlease.integrations.vllm.session.session import EngineSession, Terms
from kvlease.integrations.vllm.settings import ConnectorSettings
from kvlease.plan import PlanInputs
from kvlease.spec import FullAttention
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY
NUM_ROWS = 64
_STEPS_TO_REST = 8


class Bench:
    """A manager over a small pool, and the part of vLLM that calls it."""

    def __init__(self, address: str, *, host_bytes: int = 0, key_counts: bool = False) -> None:
        layer = FullAttention(name="chunks", num_kv_heads=1, head_size=16, dtype="uint8")
        terms = Terms(
            identity=Identity(tuple("laws" for _ in FIELDS)),
            inputs=PlanInputs(
                layers=(layer,), tokens_per_block=16, device_blocks=NUM_ROWS, host_bytes=host_bytes
            ),
            cache="laws",
            magazine="laws",
            key_counts=key_counts,
        )
        settings = ConnectorSettings(socket=address, deadline_ms=5000, retry_seconds=0.1)
        self.manager = managing.PoolManager()
        self.desk = Desk(EngineSession.open(settings, terms), self.manager.held)
        self.manager.open(self.desk, num_ranks=2, stock_rows=8, has_events=True)
        self._num_jobs = 0

    def keys(self, first: int, count: int, group: int = 0) -> list[OffloadKey]:
        """Return keys of blocks."""
        numbers = range(first, first + count)
        return [make_offload_key(number.to_bytes(32, "big"), group) for number in numbers]

    def request(self, name: str, keys: list[OffloadKey]) -> ReqContext:
        """Return a request that has these keys."""
        context = ReqContext(req_id=name)
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (at + 1))
        self.manager.on_new_request(context)
        return context

    def absent_key(self) -> OffloadKey:
        """Return a key that was never stored and is known to be absent; a few share a bucket with a stored one."""
        return next(key for key in self.keys(1000, 100) if all(self.manager.absent([key])))

    def step(self, *new: str) -> None:
        """End a step, with the names of its new requests."""
        self.manager.on_schedule_end(ScheduleEndContext(new, ()))

    def rest(self) -> None:
        """Step as an idle engine does, until nothing is left to tell or to hear."""
        for _ in range(_STEPS_TO_REST):
            if not self.manager.has_pending_work():
                return
            self.step()
        raise AssertionError("an idle engine does not come to rest")

    def begin_store(
        self, context: ReqContext, keys: list[OffloadKey]
    ) -> tuple[int, list[OffloadKey]]:
        """Plan a store; return its job and the keys that are stored."""
        output = self.manager.prepare_store(keys, context)
        self._num_jobs += 1
        blocks = (
            GPULoadStoreSpec(list(range(len(output.keys_to_store))), [len(keys)], [0])
            if len(output.keys_to_store) == len(keys)
            else None
        )
        assert blocks is not None, "the stock is too small"
        job = type(
            "Job", (), {"req_id": context.req_id, "src_spec": blocks, "dst_spec": output.store_spec}
        )
        self.manager.plan({}, {self._num_jobs: job})
        return self._num_jobs, output.keys_to_store

    def end_store(
        self, job: int, context: ReqContext, keys: list[OffloadKey], failed: bool
    ) -> None:
        """Have both ranks report a store; the second one may report a failure."""
        self.manager.report({job: 1}, {job} if failed else (), ())
        self.manager.report({job: 1}, (), ())
        self.manager.complete_store(keys, context)

    def store(self, name: str, keys: list[OffloadKey], *, failed: bool = False) -> None:
        """Store keys in one request, from its beginning to its end."""
        context = self.request(name, keys)
        self.step()
        job, stored = self.begin_store(context, keys)
        self.end_store(job, context, stored, failed)
        self.manager.on_request_finished(context)
        self.rest()

    def looked_up(self, context: ReqContext, keys: list[OffloadKey]) -> list[LookupResult]:
        """Look keys up."""
        return [self.manager.lookup(key, context) for key in keys]


def requests_ask_once(address: str) -> None:
    """A request's lookups make one exchange, and none is repeated while the request waits."""
    bench = Bench(address)
    keys = [*bench.keys(0, 4), *bench.keys(0, 4, group=1)]
    bench.store("a", keys)
    before = bench.desk.num_exchanges
    context = bench.request("b", [*keys, *bench.keys(100, 4)])

    for _ in range(3):
        assert bench.looked_up(context, keys) == [HIT] * 8
        assert bench.looked_up(context, bench.keys(100, 4)) == [MISS] * 4
        bench.step()

    assert bench.desk.num_exchanges == before + 1
    assert bench.desk.books.num_held == 8
    bench.manager.on_request_finished(context)
    assert bench.manager.has_pending_work()
    bench.rest()
    assert bench.desk.books.num_held == 0
    assert bench.desk.num_exchanges == before + 2


def absent_requests_ask_nobody(address: str) -> None:
    """A request with nothing cached makes no exchange but is counted; stored blocks are found."""
    bench = Bench(address, key_counts=True)
    bench.step()
    keys = [*bench.keys(0, 4), *bench.keys(0, 4, group=1)]
    context, before = bench.request("a", keys), bench.desk.num_exchanges
    assert bench.looked_up(context, keys[:1]) == [MISS]
    assert bench.looked_up(context, keys) == [MISS] * 8
    job, stored = bench.begin_store(context, keys)
    assert (len(stored), bench.desk.num_exchanges) == (8, before)
    bench.end_store(job, context, stored, failed=False)
    bench.manager.on_request_finished(context)
    bench.rest()
    assert bench.desk.num_exchanges == before + 1
    with Client(address) as client:
        assert client.stats("laws").caches[0].counters["magazine_keys_missed"] == 8

    other = bench.request("b", [*keys, *bench.keys(100, 4)])
    assert bench.looked_up(other, keys) == [HIT] * 8
    assert bench.desk.num_exchanges == before + 2


def new_requests_are_known_by_their_first_block(address: str) -> None:
    """A request whose first block is absent makes no exchange, is reported later, and is counted all the same."""
    bench = Bench(address, key_counts=True)
    bench.step()
    keys, before = bench.keys(0, 4), bench.desk.num_exchanges
    assert bench.manager.absent([keys[0], keys[3]]) == [True, True]
    context = bench.request("a", keys)
    bench.request("short", [])
    for name in ("a", "short", "nobody"):
        bench.manager.note_absent(name)

    job, stored = bench.begin_store(context, keys)
    assert (len(stored), bench.desk.num_exchanges) == (4, before)
    bench.end_store(job, context, stored, failed=False)
    bench.manager.on_request_finished(context)
    bench.rest()

    assert bench.manager.absent([keys[0], bench.absent_key()]) == [False, True]
    again = bench.request("b", keys)
    assert bench.looked_up(again, keys) == [HIT] * 4
    with Client(address) as client:
        assert client.stats("laws").caches[0].counters["magazine_keys_missed"] == 4


def what_no_step_told_is_told_at_the_end(address: str) -> None:
    """Blocks that were written in an engine's last step are published when it ends, and the next engine finds them."""
    bench = Bench(address)
    keys = bench.keys(0, 4)
    context = bench.request("a", keys)
    bench.step()
    job, stored = bench.begin_store(context, keys)
    bench.end_store(job, context, stored, failed=False)

    bench.manager.shutdown()

    again = Bench(address)
    assert again.looked_up(again.request("b", keys), keys) == [HIT] * 4


def news_wait_for_stores_that_are_under_way(address: str) -> None:
    """News of a store waits, but not for ever, for stores that end soon, to share one exchange."""
    bench = Bench(address)
    one, two = bench.keys(0, 2), bench.keys(10, 2)
    contexts = [bench.request("a", one), bench.request("b", two)]
    bench.step()
    (first, stored), (second, _) = (
        bench.begin_store(context, keys) for context, keys in zip(contexts, (one, two), strict=True)
    )
    bench.end_store(first, contexts[0], stored, failed=False)
    before = bench.desk.num_exchanges

    bench.step()
    assert bench.desk.num_exchanges == before
    bench.end_store(second, contexts[1], two, failed=False)
    bench.step()
    assert bench.desk.num_exchanges == before + 1
    assert bench.looked_up(bench.request("c", [*one, *two]), [*one, *two]) == [HIT] * 4


def a_reset_forgets_what_was_not_told(address: str) -> None:
    """Absences under old keys are not reported under new ones, and no older block is found."""
    bench = Bench(address, key_counts=True)
    bench.step()
    keys = bench.keys(0, 4)
    bench.store("a", keys)
    bench.looked_up(bench.request("b", bench.keys(50, 4)), bench.keys(50, 1))
    before = bench.desk.num_exchanges

    bench.manager.reset_cache()

    assert not bench.desk.absences.untold.take()
    # By chance, a new key may share a bucket with an old one, and then the daemon is asked.
    num_asked = 0 if all(bench.manager.absent(keys)) else 1
    assert bench.looked_up(bench.request("c", keys), keys) == [MISS] * 4
    assert bench.desk.num_exchanges == before + num_asked


def first_tokens_wait_for_no_news(address: str) -> None:
    """Steps with new requests make no exchange just to send news, unless several follow each other."""
    bench = Bench(address)
    keys = bench.keys(0, 4)
    bench.store("a", keys)
    context = bench.request("b", keys)
    assert bench.looked_up(context, keys) == [HIT] * 4
    bench.manager.on_request_finished(context)
    before = bench.desk.num_exchanges

    for _ in range(desks.PUT_OFF_MAX):
        bench.step("c")
    assert bench.desk.num_exchanges == before
    assert bench.manager.has_pending_work()
    bench.step("c")
    assert bench.desk.num_exchanges == before + 1
    assert not bench.desk.books.is_due
    bench.rest()


def long_requests_ask_more_than_once(address: str) -> None:
    """A request with more blocks than a call may name still finds all of them."""
    bench = Bench(address)
    keys = bench.keys(0, 8)
    bench.store("a", keys)
    desks.NAMES_MAX = 3
    before = bench.desk.num_exchanges
    context = bench.request("b", [*keys, *bench.keys(100, 2)])

    assert bench.looked_up(context, keys) == [HIT] * 8
    assert bench.looked_up(context, bench.keys(100, 2)) == [MISS] * 2
    assert bench.desk.num_exchanges == before + 4
    assert bench.desk.books.num_held == 8


def requests_that_wait_are_asked_for_together(address: str) -> None:
    """Requests that arrive together make one exchange; misses are asked for again some steps later."""
    bench = Bench(address)
    keys, late = bench.keys(0, 4), bench.keys(50, 4)
    bench.store("a", keys)
    before = bench.desk.num_exchanges
    first = bench.request("b", keys)
    second = bench.request("c", keys)
    third = bench.request("d", late)

    assert bench.looked_up(first, keys) == bench.looked_up(second, keys) == [HIT] * 4
    assert bench.looked_up(third, late) == [MISS] * 4
    assert bench.desk.num_exchanges == before + 1
    assert bench.desk.books.num_held == 4

    bench.store("e", late)
    for _ in range(8):
        bench.step()
    assert bench.looked_up(third, late) == [HIT] * 4
    for context in (first, second, third):
        bench.manager.on_request_finished(context)
    bench.step()
    assert bench.desk.books.num_held == 0


def keys_that_nobody_lists_are_asked_together(address: str) -> None:
    """If a request does not list its keys, its first lookups are retried and answered a step later."""
    bench = Bench(address)
    keys = bench.keys(0, 4)
    bench.store("a", keys)
    managing.KNOWS_POSITIONS = False
    context = bench.request("b", [])
    before = bench.desk.num_exchanges

    assert bench.looked_up(context, [*keys, *bench.keys(9, 1)]) == [RETRY] * 5
    bench.step()

    assert bench.looked_up(context, [*keys, *bench.keys(9, 1)]) == [HIT] * 4 + [MISS]
    assert bench.desk.num_exchanges == before + 1


def news_are_told_while_the_engine_computes(address: str) -> None:
    """What a store brings is published while nobody waits, and a request that asks hears the answer first."""
    bench = Bench(address)
    one, two = bench.keys(0, 2), bench.keys(10, 2)
    context = bench.request("a", one)
    bench.step()
    job, stored = bench.begin_store(context, one)
    bench.end_store(job, context, stored, failed=False)
    bench.step()
    assert not bench.desk.books.is_due
    assert bench.manager.has_pending_work()
    assert bench.looked_up(bench.request("b", one), one) == [HIT] * 2
    assert not bench.manager.has_pending_work()

    bench.store("c", two)
    another = Bench(address)
    assert another.looked_up(another.request("d", [*one, *two]), [*one, *two]) == [HIT] * 4


def failed_stores_are_not_found(address: str) -> None:
    """A store that one rank could not write is not published, and its rows are used again."""
    bench = Bench(address)
    keys = bench.keys(0, 4)
    bench.store("a", keys, failed=True)

    assert bench.looked_up(bench.request("b", keys), keys) == [MISS] * 4
    bench.store("c", keys)
    assert bench.looked_up(bench.request("d", keys), keys) == [HIT] * 4


def refused_requests_compute(address: str) -> None:
    """A request whose load failed finds nothing more; others do."""
    bench = Bench(address)
    keys = bench.keys(0, 4)
    bench.store("a", keys)
    context = bench.request("b", keys)
    assert bench.looked_up(context, keys) == [HIT] * 4
    spec = bench.manager.prepare_load(keys, context)
    blocks = GPULoadStoreSpec([1, 2, 3, 4], [4], [0])
    job = type("Job", (), {"req_id": "b", "src_spec": spec, "dst_spec": blocks})
    bench.manager.plan({77: job}, {})

    bench.manager.report({77: 2}, {77}, {int(spec.rows[0])})
    bench.manager.complete_load(keys, context)
    bench.step()

    assert bench.looked_up(context, keys) == [MISS] * 4
    assert bench.looked_up(bench.request("c", keys), keys) == [MISS] + [HIT] * 3


def blocks_below_are_waited_for(address: str) -> None:
    """Blocks of the host pool are pending until they are on the device, and then hits."""
    bench = Bench(address, host_bytes=1 << 20)
    keys = bench.keys(0, 8)
    bench.store("a", keys)
    for number in range(12):
        bench.store(f"filler {number}", bench.keys(1000 + 8 * number, 8))
        time.sleep(0.02)
    context = bench.request("b", keys)
    found = bench.looked_up(context, keys)
    assert PENDING in found, found
    assert MISS not in found, found

    end = time.monotonic() + 0.9
    while PENDING in (found := bench.looked_up(context, keys)) and time.monotonic() < end:
        time.sleep(0.003)
        bench.step()

    assert found == [HIT] * 8, found


def rows_outlive_a_reset_until_their_jobs_end(address: str) -> None:
    """A reset during a store leaves its rows alone until all ranks have ended it; then they are in stock again."""
    bench = Bench(address)
    keys = bench.keys(0, 4)
    context = bench.request("a", keys)
    bench.step()
    job, stored = bench.begin_store(context, keys)
    stock = set(bench.desk.books.stock)

    bench.manager.reset_cache()
    assert set(bench.desk.books.stock) == stock
    bench.manager.report({job: 1}, (), ())
    assert set(bench.desk.books.stock) == stock
    bench.manager.report({job: 1}, (), ())

    assert len(bench.desk.books.stock) == len(stock) + len(stored)


def stores_into_a_lost_pool_publish_nothing(address: str) -> None:
    """A store that ends after its pool was lost publishes no row of the next pool that awaits the same content."""
    bench = Bench(address)
    keys = bench.keys(0, 4)
    contexts = [bench.request(name, keys) for name in ("a", "b")]
    bench.step()
    job, stored = bench.begin_store(contexts[0], keys)
    bench.desk.books.wipe(NUM_ROWS)
    bench.desk.on_loss(None)
    bench.step()
    bench.manager.prepare_store(keys, contexts[1])

    bench.end_store(job, contexts[0], stored, failed=True)
    for context in contexts:
        bench.manager.on_request_finished(context)
    bench.rest()

    assert bench.looked_up(bench.request("c", keys), keys) == [MISS] * 4
    bench.store("d", keys)
    assert bench.looked_up(bench.request("e", keys), keys) == [HIT] * 4


def main() -> None:
    """Put one law to the test."""
    address, law = sys.argv[1:]
    laws: dict[str, Any] = {
        one.__name__: one
        for one in (
            requests_ask_once,
            absent_requests_ask_nobody,
            new_requests_are_known_by_their_first_block,
            what_no_step_told_is_told_at_the_end,
            news_wait_for_stores_that_are_under_way,
            news_are_told_while_the_engine_computes,
            a_reset_forgets_what_was_not_told,
            requests_that_wait_are_asked_for_together,
            first_tokens_wait_for_no_news,
            long_requests_ask_more_than_once,
            keys_that_nobody_lists_are_asked_together,
            failed_stores_are_not_found,
            refused_requests_compute,
            blocks_below_are_waited_for,
            rows_outlive_a_reset_until_their_jobs_end,
            stores_into_a_lost_pool_publish_nothing,
        )
    }
    laws[law](address)


if __name__ == "__main__":
    main()
