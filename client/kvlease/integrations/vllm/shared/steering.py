"""Own when the scheduler's questions lead to exchanges; modules beside say what is exchanged, and how.

Blocks of a prefix are held before vLLM looks the prefix up, and blocks are fetched before vLLM counts them. Two methods
of vLLM's coordinator are wrapped for this; if anything goes wrong here, they answer as they would without us.

Two rules keep engines of one pool from waiting for each other for ever. Blocks to admit a request are fetched all or
none. And an engine that runs no request asks as if it ran one; if it still gets nothing, it gives all its blocks back
and asks later.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvlease.geometry import ceil_div
from kvlease.integrations.vllm.shared import readers
from kvlease.integrations.vllm.shared.dealing import Dealer
from kvlease.integrations.vllm.shared.magazine import Books
from kvlease.integrations.vllm.shared.orders import Settled, Wish
from kvlease.integrations.vllm.shared.pace import Pace, Supply
from kvlease.integrations.vllm.shared.pool import SharedBlockPool
from kvlease.integrations.vllm.shared.prefixes import Prefixes

NAMES_MAX: Final = 16_384
"""Names that one exchange asks for at most."""
_AHEAD_NAMES_MAX: Final = 2_048
_AHEAD_REQUESTS_MAX: Final = 16
_STEPS_UNTIL_PUBLISHED: Final = 4
"""Steps after which written blocks are published, if no exchange was made for another reason."""
_REFILL_SHARE: Final = 4
"""What a step fetches only to have more in stock is at least the stock that is wanted, divided by this."""
_STEPS_UNTIL_ASKED_AGAIN: Final = 32
"""Steps after which the prefix of a request that waits for blocks is looked up again."""
_PAUSE_STEPS_MIN: Final = 2
"""Steps between two tries to admit a request, at least: in the step between, blocks held for it are given back."""
_PAUSE_STEPS_MAX: Final = 32


class Steering:
    """Answer the scheduler's questions about one pool."""

    def __init__(
        self,
        coordinator: Any,
        pool: SharedBlockPool,
        dealer: Dealer,
        supply: Supply,
        engine_id: str,
    ) -> None:
        """Remember what to ask; `install` begins. Connectors beside ours are found by `engine_id`."""
        self._engine_id = engine_id
        self._coordinator = coordinator
        self._pool = pool
        self._prefixes = Prefixes(coordinator, pool)
        self.books: Books = pool.books
        self._dealer = dealer
        self._fence = pool.books.fence
        self._supply = supply
        self._guard = dealer.guard
        self._pace = Pace()
        self._find: Callable[..., Any] = coordinator.find_longest_cache_hit
        self._count: Callable[..., int] = coordinator.get_num_blocks_to_allocate
        self._stand_in = KVCacheBlock(block_id=0, ref_cnt=1)
        self.waiting: dict[str, Any] = {}
        """Requests that are not admitted yet, by id."""
        self.is_starved = False
        """Whether the step being scheduled lacks blocks and the daemon could not be asked for them."""
        self._step = 1
        self._asked: set[bytes] = set()
        self._blocked = (b"", 0)
        self._last_sought = b""
        self._ahead: set[int] = set()
        self._is_held_back = False
        self._has_exchanged = False
        self._exchanged_at_step = 0
        self._pause_steps = 0
        self._resumes_at_step = 0
        self._unused_then = 0
        self._drops_all = False

    def __repr__(self) -> str:
        """Show life: the step, and the books."""
        return f"<Steering at step {self._step}, {self.books!r}>"

    def install(self) -> None:
        """Wrap the two methods of the coordinator."""
        if readers.has_readers(self._engine_id):
            self._pool.freed = {}
        self._coordinator.find_longest_cache_hit = self.find
        self._coordinator.get_num_blocks_to_allocate = self.count

    # What the scheduler asks.

    def find(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        """Find the longest cached prefix, after asking the daemon for blocks that are not held here."""
        self._guard.shield(lambda: self._hold(block_hashes, max_cache_hit_length), None, "lookup")
        return self._find(block_hashes, max_cache_hit_length)

    def count(
        self, request_id: str, num_tokens: int, new_computed_blocks: Any, *more: Any, **words: Any
    ) -> int:
        """Count the blocks that a request needs, and try to have them in stock."""
        total = self._count(request_id, num_tokens, new_computed_blocks, *more, **words)
        managers = self._coordinator.single_type_managers
        is_running = any(request_id in manager.num_cached_block for manager in managers)
        if is_running and not total and not any(new_computed_blocks):
            # The token fits into a block that the request has, as in most steps.
            self._pool.allowance = self._pool.num_elsewhere
            return 0
        fresh = total
        if any(new_computed_blocks):
            # Stand-ins that count as used replace the blocks that were hit, so that only new blocks are counted.
            stand_ins = tuple([self._stand_in] * len(blocks) for blocks in new_computed_blocks)
            fresh = self._count(request_id, num_tokens, stand_ins, *more, **words)
        is_estimate = is_running and bool(words.get("apply_admission_cap"))
        hits = {block.block_id for blocks in new_computed_blocks for block in blocks}
        self._pool.allowance = 0
        if self._dealer.is_alone:
            self._pool.num_elsewhere = self.books.num_idle
        if not is_estimate:
            self._guard.shield(
                lambda: self._provide(fresh, hits, is_running=is_running), None, "allocation"
            )
        elif fresh > self.books.num_stock + self._pool.num_elsewhere:
            self._guard.shield(lambda: self._ask_anew(fresh), None, "allocation")
        # While blocks were fetched, a lost answer or a duplicate publication may have taken hits away.
        is_hit_gone = any(
            block.block_hash is None and not block.is_null
            for blocks in new_computed_blocks
            for block in blocks
        )
        if is_hit_gone or (not is_running and self._is_held_back):
            self._pool.allowance = -self._pool.num_gpu_blocks
        elif is_estimate or fresh <= self.books.num_stock:
            self._pool.allowance = total - fresh + self._pool.num_elsewhere
        return total

    # What the connector tells.

    def stock_up(self) -> None:
        """Learn how many blocks are available, and fetch as many as an idle engine keeps."""
        self._guard.shield(
            lambda: self._deal(self._wish(num_new=self._supply.rest_max)), None, "stock"
        )
        self._has_exchanged = False

    def end_step(self, num_active: int) -> None:
        """Note that a step was scheduled; send what is due, so that the daemon answers while the step is computed.

        Each of `num_active` requests may need a block per group in the next step.
        """
        self._dealer.counts.steps += 1
        if not self._has_exchanged and self._dealer.is_ready and self._pace.may_call:
            self._send_what_is_due(num_active)
        self._step = self._pool.step = self._step + 1
        self._pace.step()
        self._has_exchanged = False
        self._is_held_back = False
        self.is_starved = False
        self._ahead.clear()
        self._asked.clear()
        self._pool.allowance = 0

    def hear(self) -> None:
        """Take over the answer to what the last step sent."""
        self._dealer.hear()
        self._pool.num_elsewhere = self._dealer.num_available

    def rest(self) -> None:
        """Note that no request is left: tell the daemon what is due, and keep only what the next request may need."""
        if self._dealer.is_ready and self.has_news:
            rest_max = self._supply.rest_max
            self._deal(self._wish(num_new=self._refill(rest_max), stock_max=rest_max))

    @property
    def has_news(self) -> bool:
        """Whether there is anything to publish or to give back that no request waits for."""
        return not self._dealer.is_orphan and (
            self.books.has_news or self._has_too_much or self._drops_all
        )

    @property
    def _has_too_much(self) -> bool:
        books, supply = self.books, self._supply
        return books.num_idle > supply.idle_max or books.num_stock > supply.rest_max

    def drop_all(self) -> None:
        """Drop all held blocks that nobody uses, with the next exchange."""
        self._drops_all = True

    def _send_what_is_due(self, num_active: int) -> None:
        """Send what nobody waits for, with a wish for blocks that the next requests would wait for."""
        is_due = self._is_due
        if self._drops_all or self._pause_steps:
            # A request that does not fit waits for what becomes free, so the answer is heard before the next step.
            if self._drops_all or is_due:
                self._deal(self._wish())
            return
        wanted, num_stock = self._supply.stock_wanted, self.books.num_stock
        is_low = num_stock < num_active * len(self._coordinator.single_type_managers)
        if not (is_due or is_low or (self.waiting and 2 * num_stock < wanted)):
            return
        refill = self._refill(wanted)
        if is_due or _REFILL_SHARE * refill >= wanted:
            self._note_exchange()
            self._dealer.begin(self._wish(num_new=refill))

    @property
    def _is_due(self) -> bool:
        """Whether anything that was written, or is held without use, has waited long enough."""
        if self._step - self._exchanged_at_step < _STEPS_UNTIL_PUBLISHED:
            return False
        return self._fence.has_written or self.books.num_idle > 2 * self._supply.idle_max

    # Prefixes.

    def _hold(self, block_hashes: Any, max_tokens: int) -> None:
        """Hold the blocks that the daemon has of a prefix, and of the prefixes of requests that wait behind it."""
        missing, kept = self._prefixes.missing(block_hashes, max_tokens)
        self._last_sought = next(reversed(missing), b"")
        if not missing or not self._is_worth_asking(self._last_sought) or not self._dealer.is_ready:
            return
        names = list(missing)
        if self._dealer.note_miss(names, self._prefixes.deciding(names)):
            self._asked.add(self._last_sought)
            return
        if self._is_paused or not self._pace.may_call:
            # The daemon is asked later; to admit the request now would compute blocks that may be cached.
            self._is_held_back = True
            return
        self._asked.add(self._last_sought)
        # If a request could not be admitted, blocks for others must not take the room that it needs.
        is_short = bool(self._pause_steps)
        ahead = {} if is_short else self._missing_ahead(missing, block_hashes)
        sought = {**missing, **ahead}
        settled = self._deal(
            self._wish(
                names=tuple(sought)[:NAMES_MAX],
                stops_at_miss=not ahead and len(self._coordinator.single_type_managers) == 1,
                num_new=0 if is_short else self._ahead_blocks(0),
                kept=kept,
            ),
            sought,
        )
        if settled is not None and ahead:
            self._ahead.update(block for _, block in settled.held)

    def _is_worth_asking(self, last_name: bytes) -> bool:
        if last_name in self._asked:
            return False
        blocked_name, step = self._blocked
        return last_name != blocked_name or self._step - step >= _STEPS_UNTIL_ASKED_AGAIN

    def _missing_ahead(self, own: Mapping[bytes, int], own_hashes: Any) -> dict[bytes, int]:
        """Return the missing names of the requests that come next, so that they need no call of their own."""
        ahead: dict[bytes, int] = {}
        for request in list(self.waiting.values())[:_AHEAD_REQUESTS_MAX]:
            if request.block_hashes is own_hashes:
                continue
            missing, _ = self._prefixes.missing(request.block_hashes, request.num_tokens - 1)
            last_name = next(reversed(missing), b"")
            if not missing or not self._is_worth_asking(last_name):
                continue
            if self._dealer.is_absent(self._prefixes.deciding(list(missing))):
                # This request will need no call.
                continue
            if len(ahead) + len(missing) > _AHEAD_NAMES_MAX:
                break
            self._asked.add(last_name)
            ahead |= {name: tokens for name, tokens in missing.items() if name not in own}
        return ahead

    # Blocks.

    def _provide(self, fresh: int, hits: set[int], *, is_running: bool) -> None:
        """Try to have `fresh` blocks in stock, among them those that the last step fetched."""
        if fresh > self.books.num_stock:
            self._dealer.hear()
        if (short := fresh - self.books.num_stock) <= 0:
            return
        if not self._dealer.is_ready:
            is_alone = self._dealer.is_alone
            self._pool.forget(
                self.books.evict(short, kept=hits) if is_alone else self.books.give_up()
            )
            self.is_starved = not is_alone and fresh > self.books.num_stock
            return
        if is_running:
            self._provide_running(short)
        elif not self._is_held_back:
            self._provide_new(fresh, short, hits)

    def _provide_running(self, short: int) -> None:
        """Fetch blocks for a running request, which is preempted without them; ask again if a preemption freed some."""
        if self._has_exchanged and self.books.num_unused == self._unused_then:
            return
        if not self._pace.may_press:
            return
        refill = self._refill(self._supply.stock_wanted)
        is_scarce = self._dealer.num_available < short or self._has_exchanged
        self._deal(self._wish(num_running=short + refill, idle_max=0 if is_scarce else None))

    def _ask_anew(self, fresh: int) -> None:
        """Fetch blocks for a request that has loaded its prefix; the daemon may have more than it last said."""
        if self._dealer.is_ready and self._pace.may_call:
            self._deal(self._wish(num_running=fresh - self.books.num_stock, all_or_nothing=True))

    def _refill(self, stock_wanted: int) -> int:
        """Return how many blocks to fetch in passing for a stock of `stock_wanted`; 0 while a request lacks some."""
        if self._pause_steps or self._drops_all:
            return 0
        dealer = self._dealer
        return self._supply.refill(
            stock_wanted, self.books.num_stock, dealer.num_available, dealer.num_magazines
        )

    def _provide_new(self, fresh: int, short: int, hits: set[int]) -> None:
        """Fetch blocks to admit a request, all or none."""
        is_alone = not self.books.num_used
        if self._is_paused:
            return
        # A request goes on right after its prefix was looked up; otherwise the next step would look it up again, for
        # ever.
        if not (self._pace.may_press if self._has_exchanged else self._pace.may_call):
            self._is_held_back = True
            return
        short += self._ahead_blocks(fresh)
        wish: dict[str, Any] = {"num_running": short} if is_alone else {"num_new": short}
        if is_alone and self._pause_steps:
            # The rest of the stock comes back with the missing blocks, or is free for others meanwhile.
            wish = {"num_running": fresh, "stock_max": 0, "idle_max": 0}
        self._deal(self._wish(**wish, all_or_nothing=True, kept=hits))
        if fresh <= self.books.num_stock:
            self._pause_steps = 0
            self._blocked = (b"", 0)
            return
        self._pause_steps = min(_PAUSE_STEPS_MAX, max(_PAUSE_STEPS_MIN, 2 * self._pause_steps))
        self._resumes_at_step = self._step + self._pause_steps
        self._blocked = (self._last_sought, self._step)
        if is_alone:
            # To hold what another engine waits for, while waiting for what that engine holds, would never end.
            self._drops_all = True
            self._blocked = (b"", 0)

    def _ahead_blocks(self, fresh: int) -> int:
        """Return how many blocks to fetch for waiting requests, besides the `fresh` ones that one of them needs now."""
        requests = list(self.waiting.values())[:_AHEAD_REQUESTS_MAX]
        wanted = sum(
            ceil_div(request.num_tokens, manager.block_size)
            for request in requests
            for manager in self._coordinator.single_type_managers
        )
        return self._supply.ahead(
            wanted - fresh,
            max(0, self.books.num_stock - fresh),
            self._dealer.num_available - fresh,
            self._dealer.num_magazines,
        )

    @property
    def _is_paused(self) -> bool:
        """Whether it is too early to try again to admit a request, because nothing has changed here."""
        return self._step < self._resumes_at_step and self.books.num_unused <= self._unused_then

    def _wish(
        self, *, idle_max: int | None = None, stock_max: int | None = None, **words: Any
    ) -> Wish:
        if self._drops_all:
            idle_max = stock_max = 0
        return Wish(
            idle_max=self._supply.idle_max if idle_max is None else idle_max,
            stock_max=self._supply.stock_max if stock_max is None else stock_max,
            kept={
                *words.pop("kept", ()),
                *self._ahead,
                *readers.still_read(self._engine_id, self._pool.freed, self._step),
            },
            **words,
        )

    def _deal(
        self, wish: Wish, tokens: Mapping[bytes, int] = MappingProxyType({})
    ) -> Settled | None:
        self._note_exchange()
        settled = self._dealer.deal(wish)
        self._unused_then = self.books.num_unused
        self._pool.num_elsewhere = self._dealer.num_available
        if settled is not None:
            self._drops_all = False
            self._pool.hold(settled.held, tokens)
        return settled

    def _note_exchange(self) -> None:
        self._pace.spend()
        self._has_exchanged = True
        self._exchanged_at_step = self._step
        self._unused_then = self.books.num_unused
