"""Own variants of owned memory without its fence, for tests that prove that the fence keeps tokens right."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from kvlease.integrations.vllm.fence import Fence
from kvlease.integrations.vllm.owned.connector import KVLeaseOwnedConnector
from kvlease.integrations.vllm.owned.keeper import Keeper
from kvlease.integrations.vllm.owned.scheduler import OwnedScheduler


class _HastyFence(Fence):
    """Treat everything as written as soon as it is scheduled."""

    def note(self, block_id: int, name: bytes, position: int = 0) -> None:
        self.note_written(block_id, name, position)


class _HastyKeeper(Keeper):
    """Publish blocks whose bytes do not exist yet."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fence = _HastyFence()


class _HastyScheduler(OwnedScheduler):
    keeper_class = _HastyKeeper

    def dispatch(self, *, is_empty: bool) -> int:
        if self.keeper is not None:
            self.keeper.exchange(0)
        return super().dispatch(is_empty=is_empty)


class HastyConnector(KVLeaseOwnedConnector):
    """Publish at schedule time, as the engine's own index does."""

    scheduler_class = _HastyScheduler


class _CarelessKeeper(Keeper):
    """Overwrite blocks that are findable."""

    def num_free(self, num_in_queue: int) -> int:
        return num_in_queue

    def require(self, num_blocks: int) -> bool:
        return bool(num_blocks)

    def pick(self, num_blocks: int) -> list[int]:
        return list(islice(self._next_free(), num_blocks))

    def gave(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._forget(block_id)

    def _to_retract(self, num_spare: int) -> list[int]:
        del num_spare
        return []


class _CarelessScheduler(OwnedScheduler):
    keeper_class = _CarelessKeeper


class CarelessConnector(KVLeaseOwnedConnector):
    """Overwrite blocks without retracting them first."""

    scheduler_class = _CarelessScheduler
