"""Own a played node: its pools and their memory, the engines that live there, and what befalls either."""

import random
from typing import Final

from kvlease.memory.mapped import Identity
from tests.integrations.vllm.played.copies import Copier
from tests.integrations.vllm.played.engine import Build, PlayedEngine
from tests.integrations.vllm.played.pool import PlayedPool
from tests.integrations.vllm.played.rank import Rank
from tests.integrations.vllm.played.session import PlayedSession, Weather
from tests.integrations.vllm.played.stamps import Memory, Rows

_WINDOWS: Final = ((0,), (0,), (0, 40), (0, 70))
"""Tokens of each group's window; 0 without one."""
_BLOCKS: Final = (20, 28, 40, 70)
"""Blocks of an engine's cache for each group; the longest request has 16."""
_ROWS: Final = (30, 60, 200)
"""Rows of the offloading pool for each group."""


class Node:
    """A node of engines that are alike but for their steps; of owned mode it has one engine at a time."""

    def __init__(self, modes: tuple[str, ...], model: str, chance: random.Random) -> None:
        self.engines: list[PlayedEngine] = []
        self.is_owned = "owned" in modes
        self.is_shared = "shared" in modes
        self.has_rows = "offload" in modes
        losses = chance.choice([0, 0, 0.05, 0.3])
        self.weather = Weather(
            losses=losses if self.is_owned or self.is_shared else min(losses, 0.1),
            outages=chance.choice([0, 0, 0.05]),
        )
        self._modes = modes
        self._model = model
        self._chance = chance
        self._windows = chance.choice(_WINDOWS)
        self._num_blocks = chance.choice(_BLOCKS) * len(self._windows)
        self._num_rows = chance.choice(_ROWS) * len(self._windows)
        self._are_copies_late = chance.random() < 0.4
        self._are_steps_ahead = chance.random() < 0.75
        self._num_born = self._num_pools = 0
        self._make_blocks()
        self._make_rows()

    def start(self) -> None:
        """Start an engine."""
        chance, name = self._chance, f"e{self._num_born}"
        self._num_born += 1
        build = Build(
            modes=self._modes,
            model=self._model,
            num_blocks=self._num_blocks,
            windows=self._windows,
            is_async=self._are_steps_ahead ^ (chance.random() < 0.2),
            step_tokens_max=chance.choice([64, 96, 200]),
            requests_max=chance.choice([3, 6]),
            retention_interval=chance.choice([None, None, 0]),
        )
        if self.is_owned:
            self._blocks.claim(name)
        has_memory = self.is_owned or self.is_shared
        rank = Rank(self._memory if has_memory else Memory(self._num_blocks), self._windows)
        copier = Copier(
            rank,
            lambda: self._rows,
            has_one_group=len(self._windows) == 1,
            device=chance if self._are_copies_late else None,
        )
        sessions = [self._session(mode, name) for mode in self._modes]
        self.engines.append(
            PlayedEngine(build, sessions, rank, copier if self.has_rows else None, chance)
        )

    def end(self, engine: PlayedEngine) -> None:
        """End an engine; its magazines end with it."""
        self.engines.remove(engine)
        for session in engine.sessions.values():
            session.pool.end(session.name)

    def end_pool(self) -> None:
        """End the shared pool; only engines that start from now on have another one."""
        for engine in self.engines:
            engine.sessions["shared"].end_pool()
        self._make_blocks()

    def replace_rows(self) -> None:
        """Replace the offloading pool by an empty one, as a daemon does that was killed with its memory."""
        self._make_rows()
        for engine in self.engines:
            engine.sessions["offload"].replace_pool(self._row_pool, self._row_memory)

    def check(self) -> None:
        """Check that every pool's blocks are each in one state."""
        self._blocks.check()
        self._row_pool.check()
        for engine in self.engines:
            for session in engine.sessions.values():
                session.pool.check()

    def _session(self, mode: str, name: str) -> PlayedSession:
        pool, memory = self._blocks, self._block_memory
        if mode == "offload":
            pool, memory = self._row_pool, self._row_memory
        return PlayedSession(name, pool, memory, self.weather, self._chance)

    def _make_blocks(self) -> None:
        self._blocks = PlayedPool(self._num_blocks)
        self._memory = Memory(self._num_blocks)
        self._block_memory = self._new_identity("device")

    def _make_rows(self) -> None:
        self._row_pool = PlayedPool(self._num_rows)
        self._row_memory = self._new_identity("tables")
        self._rows = Rows(self._row_memory, self._num_rows)

    def _new_identity(self, kind: str) -> Identity:
        self._num_pools += 1
        return ((kind, 1, self._num_pools),)
