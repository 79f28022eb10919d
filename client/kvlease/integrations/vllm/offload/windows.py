"""Own which blocks of a chunk a window still stores: only those behind the last block that it has lost.

A window's blocks are freed in turn, but handed out again in any order. vLLM's offloading scheduler takes those that
others got out of a chunk, and tells the ranks only where the rest begins and how many blocks it has. So if blocks in
front of a gap stayed, those behind it would be stored in the place of others. No load asks for what is in front.
"""

from typing import Any


def forget_before_gaps(scheduler: Any, output: Any) -> None:
    """Have the scheduler forget all blocks up to the last one of a request's window that a step gives to others.

    Chunks of one block have no gaps. `output` is what vLLM has scheduled.
    """
    blocks_per_chunk = scheduler.config.blocks_per_chunk
    if blocks_per_chunk == 1 or not scheduler._sliding_window_groups:  # noqa: SLF001 - probed at import
        return
    given = _given(scheduler, output)
    for status in scheduler._req_status.values():  # noqa: SLF001 - the same
        for group in scheduler._sliding_window_groups:  # noqa: SLF001 - the same
            state = status.group_states[group]
            first = state.next_stored_chunk_idx * blocks_per_chunk
            lost = [at for at, block in enumerate(state.block_ids[first:], first) if block in given]
            if lost:
                state.block_ids[first : lost[-1] + 1] = [0] * (lost[-1] + 1 - first)


def _given(scheduler: Any, output: Any) -> set[int]:
    """Return the blocks that a step gives to requests; block 0 stands for none."""
    given: set[int] = set(scheduler._current_batch_allocated_block_ids)  # noqa: SLF001 - probed at import
    groups = [one.block_ids for one in output.scheduled_new_reqs]
    groups += [one for one in output.scheduled_cached_reqs.new_block_ids if one is not None]
    for blocks_of_groups in groups:
        given.update(*blocks_of_groups)
    given.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
    return given - {0}
