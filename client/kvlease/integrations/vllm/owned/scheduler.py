"""Own the scheduler's half of owned memory: restore the index at the start, and keep the fence from then on."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvlease.geometry import ceil_div
from kvlease.integrations.vllm.fence import unpacked_keys
from kvlease.integrations.vllm.owned.death import is_dead
from kvlease.integrations.vllm.owned.keeper import Keeper
from kvlease.integrations.vllm.owned.memory import Claim
from kvlease.integrations.vllm.owned.pool import OwnedPool
from kvlease.integrations.vllm.owned.terms import Needs
from kvlease.integrations.vllm.session.session import EngineSession, SessionEvent
from kvlease.magazine import Exchanged, ExchangeOrder, Inventory
from kvlease.memory.mapped import Identity
from kvlease.plan import CachePlan

_logger: Final = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.05
_PROOF_SECONDS: Final = 0.25
"""Seconds between checks whether the control process is dead."""
_RESERVE_SHARE: Final = 8
"""At most the pool's blocks divided by this are kept spare, so that a longest request fits while the daemon is away."""


class SessionCalls:
    """A session in the form in which the keeper calls it."""

    def __init__(self, session: EngineSession) -> None:
        """Use an open session."""
        self._session = session
        self._was_dead = False
        self._ask_at = 0.0

    @property
    def is_answering(self) -> bool:
        """Whether a call is worth making."""
        return self._session.is_on

    @property
    def is_returning(self) -> bool:
        """Whether the daemon answers, or did so moments ago."""
        return self._session.is_returning

    @property
    def is_dead(self) -> bool:
        """Whether the daemon is proven dead; False once the session is closed and reports nothing more."""
        if self._session.is_closed:
            return False
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + _PROOF_SECONDS
            self._was_dead = is_dead(self._session.settings.address)
        return self._was_dead

    def exchange(self, order: ExchangeOrder) -> Exchanged | None:
        """Carry out an exchange; None if no answer came."""
        return self._session.exchange(order, None)

    def begin(self, order: ExchangeOrder) -> bool:
        """Send an exchange, whose answer `answered` takes."""
        return self._session.begin(order)

    def answered(self) -> Exchanged | None:
        """Wait for the answer to the exchange that was begun; None if none came."""
        return self._session.answered()

    def inventory(self) -> Inventory | None:
        """Return the magazine's inventory, or None; also ends the session's own doubt."""
        return self._session.reconciled()


class OwnedScheduler:
    """The scheduler's half for one engine."""

    keeper_class: type[Keeper] = Keeper

    def __init__(
        self, needs: Needs, open_session: Callable[[CachePlan | None], EngineSession]
    ) -> None:
        """Begin without a session; `begin` opens it, for the plan that the ranks have claimed."""
        self._needs = needs
        self._open_session = open_session
        self._session: EngineSession | None = None
        self._memory: Identity | None = None
        self._pool: Any = None
        self.keeper: Keeper | None = None
        """The keeper of the pool; None while the pool is not observed."""
        self.parts = False
        """Whether the ranks must make their memory private to this engine, because the daemon gives it no blocks."""

    def bind(self, pool: Any) -> None:
        """Remember the pool."""
        self._pool = pool

    def begin(self, claims: Sequence[Claim], *, is_whole: bool) -> None:
        """Restore the index of a pool that every rank has claimed, and observe the pool from now on.

        If only some ranks have claimed it, nothing is restored or published, but findable blocks are still retracted
        before these ranks overwrite them. If the daemon has meanwhile lost the claimed memory, the engine goes on
        without the daemon.
        """
        session = self._session = self._open_session(claims[0].plan)
        self._memory = claims[0].memory
        session.keep(claims[0].memory)
        pool = self._pool
        event, inventory = self._first_inventory(session)
        if event.ends_memory:
            self._end(session)
            return
        keeper = self.keeper_class(
            pool.num_gpu_blocks, self._needs, SessionCalls(session), self._keys
        )
        keeper.publishes = is_whole
        observed = OwnedPool.observe(pool, keeper, session.reset)
        if inventory is None:
            keeper.ledger.doubt_all()
            keeper.doubt()
            _logger.error(
                "The kvlease daemon does not say what it has; the engine starts cold, provided that the daemon answers "
                "before there are requests.",
                extra={"action": "owned_unknown"},
            )
        else:
            keeper.restore(inventory.blocks.tolist(), unpacked_keys(inventory.keys))
            observed.order_restored(_ordered(claims, keeper))
            if not is_whole:
                keeper.reset()
            _logger.info(
                "%d of %d blocks are still cached from an earlier run.",
                keeper.num_restored,
                pool.num_gpu_blocks - 1,
                extra={"action": "owned_restored", "blocks": keeper.num_restored},
            )
        self.keeper = keeper

    def dispatch(self, *, is_empty: bool) -> int:
        """Return the id of the step that goes out now; make the memory private if the step lacks blocks for good."""
        keeper, session = self.keeper, self._session
        if keeper is None or session is None:
            return 0
        if is_empty and keeper.is_on and self._pool.is_short and not session.is_returning:
            self._part(session)
        self._pool.is_short = False
        return keeper.fence.dispatch()

    def came_back(self, step_id: int, *, is_apart: bool = False) -> None:
        """Note that a step came back on all ranks, and whether their memory is private; do what is due."""
        session, keeper = self._session, self.keeper
        if session is None or keeper is None or not keeper.is_on:
            return
        if self.parts:
            if is_apart:
                keeper.switch_off()
            return
        event = self._hear(session)
        if event.ends_memory:
            keeper.switch_off()
            self._end(session)
        elif event is SessionEvent.BACK:
            keeper.doubt()
        session.guard.shield(lambda: keeper.came_back(step_id), None, "a step's end")

    @property
    def has_work(self) -> bool:
        """Whether empty steps would let blocks be published or retracted."""
        return self.keeper is not None and self.keeper.has_work

    def close(self) -> None:
        """Publish the blocks that are written, and detach."""
        session, keeper = self._session, self.keeper
        if session is None:
            return
        if keeper is not None:
            session.guard.shield(lambda: keeper.exchange(0), False, "the last publish")
        session.close()

    def _hear(self, session: EngineSession) -> SessionEvent:
        """Poll a session; return FRESH only for memory that the ranks did not claim."""
        event = session.poll()
        if event is SessionEvent.FRESH and self._memory in {None, session.memory}:
            self._memory = session.memory
            return SessionEvent.BACK
        return event

    def _end(self, session: EngineSession) -> None:
        session.close()
        _logger.error(
            "The kvlease daemon has lost the memory of this engine's cache. The engine keeps using that memory, but "
            "its cache now ends with the engine: restart the engine to have the cache persisted again.",
            extra={"action": "owned_off"},
        )

    def _part(self, session: EngineSession) -> None:
        """Make the ranks' memory private to this engine, which cannot wait for blocks for ever.

        From now on nothing is published or retracted. Blocks that the daemon finds keep their bytes, because this
        engine writes to private pages. The pages that it reads are not written by others while its ranks have them
        claimed.
        """
        if self.parts:
            return
        self.parts = True
        session.close()
        _logger.error(
            "The kvlease daemon gives this engine's scheduler no blocks (%s). The engine now has its memory "
            "for itself, which takes up to as much memory again while it is written, and its cache now ends with the "
            "engine: once that is mended, restart the engine to have the cache persisted again.",
            session.refusal or "it does not answer",
            extra={"action": "owned_alone"},
        )

    def _keys(self, names: list[bytes]) -> list[bytes]:
        assert self._session is not None, "the keeper came with a session"
        rekeyer = self._session.rekeyer
        assert rekeyer is not None, "an engine that has the pool was attached"
        return rekeyer.of_names(names)

    def _first_inventory(self, session: EngineSession) -> tuple[SessionEvent, Inventory | None]:
        """Return a session's event, and the magazine's inventory, or None if none comes within `start_seconds`."""
        ends_at = time.monotonic() + session.settings.start_seconds
        while not (event := self._hear(session)).ends_memory:
            inventory = session.reconciled()
            if inventory is not None or time.monotonic() >= ends_at:
                return event, inventory
            time.sleep(_PAUSE_SECONDS)
        return event, None


def needs_of(vllm_config: Any, kv_cache_config: Any) -> Needs:
    """Return how many new blocks one request of an engine can get in one step, and how many to keep spare."""
    scheduling, longest_tokens = (
        vllm_config.scheduler_config,
        vllm_config.model_config.max_model_len,
    )
    speculative = getattr(vllm_config, "speculative_config", None)
    ahead_tokens = 2 * getattr(speculative, "num_speculative_tokens", 0)
    step_tokens = min(scheduling.max_num_batched_tokens, longest_tokens)
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    blocks_per_request = sum(ceil_div(step_tokens + ahead_tokens, tokens) + 2 for tokens in sizes)
    longest_blocks = sum(ceil_div(longest_tokens, tokens) + 2 for tokens in sizes)
    return Needs(
        blocks_per_request=blocks_per_request,
        reserve_blocks=min(longest_blocks, kv_cache_config.num_blocks // _RESERVE_SHARE),
        longest_blocks=longest_blocks,
    )


def _ordered(claims: Sequence[Claim], keeper: Keeper) -> list[int]:
    """Return the restored blocks in the order to evict them, which is the daemon's if a claim has it."""
    there = {
        block_id: None for claim in claims for block_id in claim.coldest_first
    } | dict.fromkeys(keeper.restored_ids)
    restored = set(keeper.restored_ids)
    return [block_id for block_id in there if block_id in restored]
