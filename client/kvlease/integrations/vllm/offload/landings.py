"""Own which blocks a step gives to requests that wait for another connector, as below MultiConnector.

vLLM's offloading scheduler stores a freed block before others write into it. It takes the blocks that a step gives away
from the requests that run, and from its own loads. It is told of no request that waits for the load of another
connector, which may write into its blocks at once.
"""

from typing import Any


def note_given(scheduler: Any, blocks: Any) -> None:
    """Have the scheduler end the stores that read blocks which a request has got and that have no name yet.

    Of a request that runs at once, these are the blocks of its last tokens. `blocks` are vLLM's, all of the request's.
    """
    given = scheduler._current_batch_allocated_block_ids  # noqa: SLF001 - probed at import of the connector
    for of_group in blocks.blocks:
        for block in reversed(of_group):
            if block.block_hash is not None:
                break
            if not block.is_null:
                given.add(block.block_id)
