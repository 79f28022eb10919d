"""Own what a streaming session changes in vLLM's offloading scheduler, which knows only requests that come once.

With each piece of its input a session is scheduled as a new request, with all of its blocks from the first one on. The
scheduler would add them behind the blocks it knows, and store wrong blocks under the keys of later tokens. The last
sampled token of a piece may also be replaced by the next piece's first token, and with it the key of its chunk.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_offload.base import make_offload_key


def forget_replaced(scheduler: Any, scheduled: Iterable[Any]) -> None:
    """Have the scheduler forget the blocks of requests that it is about to be told again, and keys that hold no more.

    `scheduled` is vLLM's data of a step's new requests.
    """
    statuses = scheduler._req_status  # noqa: SLF001 - probed at import of the connector
    for one in scheduled:
        status = statuses.get(one.req_id)
        if status is None:
            continue
        for group, state in zip(
            scheduler.config.kv_group_configs, status.group_states, strict=True
        ):
            if state.block_ids:
                state.block_ids.clear()
                _forget_keys(status.req.block_hashes, group, state.offload_keys)


def _forget_keys(hashes: list[Any], group: Any, keys: list[Any]) -> None:
    """Drop keys of chunks whose tokens have changed; all chunks behind the first such one have changed, too."""
    per_chunk = group.hashes_per_chunk
    while keys:
        last = per_chunk * len(keys) - 1
        if last < len(hashes) and make_offload_key(hashes[last], group.group_idx) == keys[-1]:
            return
        keys.pop()
