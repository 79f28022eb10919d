"""Own the scheduler's half of the shared mode: it joins pool, books, fence and daemon, and follows the steps."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from kvlease.geometry import ceil_div
from kvlease.integrations.vllm.fence import Fence
from kvlease.integrations.vllm.session.session import EngineSession
from kvlease.integrations.vllm.shared.dealing import Dealer
from kvlease.integrations.vllm.shared.magazine import Books
from kvlease.integrations.vllm.shared.memory import Mapped
from kvlease.integrations.vllm.shared.pace import Supply
from kvlease.integrations.vllm.shared.pool import SharedBlockPool
from kvlease.integrations.vllm.shared.steering import Steering

_logger: Final = logging.getLogger(__name__)

_STEPS_IN_STOCK: Final = 2
"""Steps whose blocks an engine keeps in stock, if `magazine_blocks` is not set."""
_EMPTY_STEP_SECONDS: Final = 0.001
_SHARE_IN_STOCK: Final = 8
"""The stock that an engine wants is at most the pool's blocks divided by this."""


class SharedScheduler:
    """Govern one engine's part of the pool; until `begin`, everything is vLLM's own."""

    def __init__(
        self,
        num_ranks: int,
        supply: Supply,
        open_session: Callable[[], EngineSession],
        engine_id: str,
    ) -> None:
        """Remember how to attach."""
        self._engine_id = engine_id
        self._num_ranks = num_ranks
        self._supply = supply
        self._open_session = open_session
        self._manager: Any = None
        self._session: EngineSession | None = None
        self._active: set[str] = set()
        self._last_full_id = 0
        """The newest step that went out and was not empty."""
        self.fence = Fence()
        self.dealer: Dealer | None = None
        self.steering: Steering | None = None
        self.parts = False
        """Whether the ranks must make their memory private to this engine, because the daemon gives it no blocks."""

    def __repr__(self) -> str:
        """Show life."""
        return f"<SharedScheduler {self.dealer!r}, {self.steering!r}>"

    def bind(self, kv_cache_manager: Any) -> None:
        """Remember the cache manager."""
        self._manager = kv_cache_manager

    def begin(self, mapped: Sequence[Mapped]) -> None:
        """Share the pool, if any rank's cache lies in the daemon's memory; call it before any request is scheduled."""
        if not mapped:
            return
        session = self._session = self._open_session()
        manager = self._manager
        books = Books(manager.block_pool.num_gpu_blocks, self.fence)
        pool = SharedBlockPool.share(manager.block_pool, books, self._was_reset)
        # The scheduler maps what rank 0 maps; all ranks of a cache have or lose their memory together.
        memory = min(mapped, key=lambda one: one.rank).memory
        session.keep(memory)
        self.dealer = Dealer(session, books, pool.forget, memory)
        self.steering = Steering(
            manager.coordinator, pool, self.dealer, self._supply, self._engine_id
        )
        self.steering.install()
        if len(mapped) < self._num_ranks:
            _logger.error(
                "Only %d of %d ranks have their cache in the daemon's pool, so nothing is shared; restart the engine.",
                len(mapped),
                self._num_ranks,
                extra={"action": "shared_refused"},
            )
            self.dealer.finds = False
        self.dealer.poll()
        # There are no requests yet: learn what is available, so that the first request finds some blocks.
        self.steering.stock_up()

    # Steps

    def dispatch(self, *, is_empty: bool) -> int:
        """Number the step that goes out; pause first if it is empty while requests wait or the daemon is away."""
        if self.steering is not None and self._session is not None:
            is_starved = self.steering.is_starved and not self._session.is_returning
            end_step = partial(self.steering.end_step, 0 if is_empty else len(self._active))
            self._session.guard.shield(end_step, None, "end of a step")
            if is_empty and is_starved and not self.parts:
                self._part(self._session)
            if is_empty and (self.steering.waiting or not self._session.is_on):
                time.sleep(_EMPTY_STEP_SECONDS)
        step_id = self.fence.dispatch()
        if not is_empty:
            self._last_full_id = step_id
        if self.steering is not None:
            self.steering.books.dispatched(step_id)
        return step_id

    def came_back(self, step_id: int, *, is_apart: bool = False) -> None:
        """Note that a step came back from all ranks, and whether the memory of all is private to this engine."""
        self.fence.came_back(step_id)
        if self.steering is None or self.dealer is None or self._session is None:
            return
        self._session.guard.shield(self.steering.hear, None, "answer")
        self._session.guard.shield(self.dealer.poll, None, "poll")
        if is_apart and not self.dealer.is_alone:
            self._session.guard.shield(self.dealer.go_alone, None, "going alone")
        # If steps are scheduled ahead, the next step, an empty one, has always gone out by now.
        if not self._active and self.fence.returned_id >= self._last_full_id:
            self._session.guard.shield(self.steering.rest, None, "rest")

    # Requests

    def arrived(self, request: Any) -> None:
        """Note a request that will be looked up."""
        self._active.add(request.request_id)
        if self.steering is not None:
            self.steering.waiting[request.request_id] = request

    def admitted(self, request_id: str) -> None:
        """Note that a request has its blocks."""
        if self.steering is not None:
            self.steering.waiting.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        """Note that a request has ended; its blocks are freed next."""
        self._active.discard(request_id)
        self.admitted(request_id)

    # The rest

    @property
    def has_work(self) -> bool:
        """Whether an idle engine should run an empty step to tell the daemon its news, now or once it is back."""
        if self.steering is None or self._session is None or self._active:
            return False
        return self.steering.has_news and self._session.is_returning

    @property
    def counts(self) -> dict[str, int]:
        """The counts of what was done so far."""
        return {} if self.dealer is None else self.dealer.counts.as_dict()

    def close(self) -> None:
        """Detach: published blocks stay cached, and all others become free."""
        if self._session is not None:
            _logger.info("The engine leaves the shared pool: %s", self.counts, extra=self.counts)
            self._session.close()

    def _part(self, session: EngineSession) -> None:
        """Make the ranks' memory private to this engine, which cannot wait for blocks for ever."""
        self.parts = True
        session.close()
        _logger.error(
            "The kvlease daemon gives this engine's scheduler no blocks (%s). The engine now has its memory "
            "for itself, which takes up to as much memory again while it is written: once that is mended, restart the "
            "engine to share again.",
            session.refusal or "it does not answer",
            extra={"action": "shared_alone"},
        )

    def _was_reset(self) -> None:
        if self._session is not None:
            self._session.reset()
        if self.dealer is not None:
            self.dealer.begin_generation()
        if self.steering is not None:
            self.steering.drop_all()


def supply_of(vllm_config: Any, kv_cache_config: Any, magazine_blocks: int) -> Supply:
    """Return how much an engine keeps in stock: the number that was set, or else what a few steps take at most."""
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    blocks_per_step = sum(ceil_div(tokens, spec.block_size) for spec in specs)
    num_blocks = kv_cache_config.num_blocks
    wanted = magazine_blocks or _STEPS_IN_STOCK * blocks_per_step
    return Supply(
        num_blocks=num_blocks,
        stock_wanted=min(wanted, num_blocks // _SHARE_IN_STOCK),
        longest_blocks=sum(
            ceil_div(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
            for spec in specs
        ),
    )
