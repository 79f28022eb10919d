"""Own what a reset changes in vLLM's offloading scheduler beyond vLLM's own reset."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def first_of_its_step(scheduler: Any) -> Iterator[None]:
    """Let the scheduler be reset as if no reset came before it since the last step.

    A reset leaves unfinished jobs to be flushed in the next step; another reset takes them for a step half planned.
    """
    to_flush: set[int] = scheduler._current_batch_jobs_to_flush  # noqa: SLF001 - probed at import of the connector
    left = set(to_flush)
    to_flush.clear()
    try:
        yield
    finally:
        to_flush |= left


def forget_behind_windows(scheduler: Any) -> None:
    """Keep blocks that windows have stored from being stored again: other requests may have those blocks by now.

    vLLM notes which blocks leave a window only after the stored ones, but stores from the start after a reset.
    """
    blocks_per_chunk = scheduler.config.blocks_per_chunk
    for status in scheduler._req_status.values():  # noqa: SLF001 - probed at import of the connector
        for group in scheduler._sliding_window_groups:  # noqa: SLF001 - the same
            state = status.group_states[group]
            num_stored = min(state.next_stored_chunk_idx * blocks_per_chunk, len(state.block_ids))
            state.block_ids[:num_stored] = [0] * num_stored
