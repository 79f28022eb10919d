"""Own which blocks steps are to fill, so that a step that does not fill them, or fills them wrongly, leaves no names.

With scheduling by priority, vLLM may preempt a request that it has given blocks in the same step. These blocks have
their names by then, but nobody computes what is in them.

Below MultiConnector, a load of another connector can fail in the step that was to compute from it. vLLM then computes
the request's tokens once more, but leaves their names to all blocks of that step, also if the request ends before.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

_STEPS_UNDER_WAY_MAX: Final = 2
"""Steps that have gone out when one comes back, itself among them, at most; there is no pipeline of ranks."""


class Spoilt(NamedTuple):
    """What a failed load has spoilt."""

    requests: set[str]
    """Requests that have read it, whether they have ended since or not."""
    blocks: set[int]
    """The blocks that it left unwritten to be read, and all blocks that these requests have filled since."""


NOTHING_SPOILT: Final = Spoilt(set(), set())


@dataclass(slots=True)
class _Filled:
    """What a request fills in one step."""

    blocks: Sequence[KVCacheBlock]
    """All blocks of the request."""
    named: list[tuple[KVCacheBlock, BlockHashWithGroupId]] = field(default_factory=list)


class Fills:
    """The blocks that got their names in the step being scheduled and in those under way, by request."""

    def __init__(self) -> None:
        """Begin with none."""
        self._fills: dict[str, _Filled] = {}
        self._under_way: deque[tuple[Collection[str], dict[str, _Filled]]] = deque(
            maxlen=_STEPS_UNDER_WAY_MAX
        )
        self.spoilt: set[str] = set()
        """Requests that go on after they have read what a load left unwritten; nothing that they fill gets a name."""

    def __repr__(self) -> str:
        """Show life: how many requests fill blocks."""
        return f"<Fills of {len(self._fills)} requests>"

    def note(self, request_id: str, block: KVCacheBlock, blocks: Sequence[KVCacheBlock]) -> None:
        """Note a block that has just got its name; `blocks` are all those of its request."""
        if block.block_hash is not None:
            filled = self._fills.setdefault(request_id, _Filled(blocks))
            filled.named.append((block, block.block_hash))

    def end_step(
        self, scheduled: Collection[str], taken_out: Iterable[str], ended: Iterable[str]
    ) -> set[int]:
        """Note that a step goes out; return blocks that requests taken out of it were to fill and that keep the names.

        `scheduled` are its requests, and `ended` those that have ended since the last step.
        """
        self.spoilt.difference_update(ended)
        fills, self._fills = self._fills, {}
        self._under_way.append((scheduled, fills))
        return {
            block.block_id
            for request_id in taken_out
            if request_id in fills
            for block, name in fills[request_id].named
            if block.block_hash == name
        }

    def spoil(
        self, unwritten: Collection[int], blocks_of: Mapping[str, Sequence[KVCacheBlock]]
    ) -> Spoilt:
        """Note that the step that has come back left blocks unwritten; return what that has spoilt.

        `blocks_of` gives the blocks of the requests that have any now. Nobody has read what those have that were in no
        step: they waited for their loads.
        """
        in_steps = {one for scheduled, _ in self._under_way for one in scheduled}
        blocks = set(unwritten)
        for waiting in blocks_of.keys() - in_steps:
            blocks.difference_update(_ids(blocks_of[waiting]))
        requests: set[str] = set()
        for scheduled, fills in self._under_way:
            readers = {
                one
                for one in scheduled
                if not blocks.isdisjoint(_ids(blocks_of.get(one, ())))
                or (one in fills and not blocks.isdisjoint(_ids(fills[one].blocks)))
            }
            requests |= readers
            for one in readers & fills.keys():
                blocks.update(block.block_id for block, _ in fills[one].named)
        self.spoilt.update(requests & blocks_of.keys())
        return Spoilt(requests, blocks)


def end_step(pool: Any, output: Any) -> None:
    """Note in a pool with `fills` that a step goes out, and take names away that nobody makes true."""
    preempted: set[str] = getattr(output, "preempted_req_ids", None) or set()
    scheduled = output.num_scheduled_tokens
    taken_out = preempted - scheduled.keys() if preempted else ()
    pool.evict_blocks(pool.fills.end_step(scheduled, taken_out, output.finished_req_ids or ()))


def spoil(kv_cache_manager: Any, unwritten: Collection[int]) -> Spoilt:
    """Take the names away of all that is wrong because the step that has come back left blocks unwritten."""
    pool = kv_cache_manager.block_pool
    (manager, *others) = kv_cache_manager.coordinator.single_type_managers
    assert not others, "with several groups, vLLM has refused this report"
    spoilt: Spoilt = pool.fills.spoil(unwritten, manager.req_to_blocks)
    pool.evict_blocks(spoilt.blocks)
    return spoilt


def _ids(blocks: Iterable[KVCacheBlock]) -> Iterable[int]:
    return (block.block_id for block in blocks)
