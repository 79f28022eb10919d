"""Own the plan of the pool that blocks are offloaded to; one rank's row is exactly what it stores of a chunk."""

from collections.abc import Callable, Sequence
from typing import Final

from vllm.v1.kv_offload.config import OffloadingConfig

from kvlease.errors import NeverFitsError
from kvlease.geometry import ceil_div, floor_div, round_up
from kvlease.integrations.vllm.offload.copies import HEAD_BYTES
from kvlease.plan import CachePlan, ParallelInputs, PlanInputs
from kvlease.spec import FullAttention
from kvlease.units import BLOCKS_MAX, BYTES_MAX

ENGINE_CACHES: Final = 4
"""The size of the pool, as a multiple of the engine's own cache, if `pool_bytes` is not set."""
ROW_MULTIPLE_BYTES: Final = 64


def tokens_per_chunk(config: OffloadingConfig) -> int:
    """Return how many tokens a chunk of the first group has."""
    return int(config.groups[0].tokens_per_block * config.cache.blocks_per_chunk)


def bytes_per_state(config: OffloadingConfig) -> int:
    """Return how many bytes of a row each of its tokens takes.

    ceil((HEAD_BYTES + worker_kv_bytes_per_block * blocks_per_chunk) / tokens_per_chunk)
    """
    content = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
    return ceil_div(HEAD_BYTES + content, tokens_per_chunk(config))


def bytes_per_row(config: OffloadingConfig) -> int:
    """Return the bytes of one rank's row: the bytes of its tokens, rounded up to a multiple of a cache line."""
    return round_up(bytes_per_state(config) * tokens_per_chunk(config), ROW_MULTIPLE_BYTES)


def rows_per_step(config: OffloadingConfig, tokens_per_step: int) -> int:
    """Return how many rows two steps fill at most, over all groups."""
    per_chunk = [group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups]
    return 2 * sum(ceil_div(tokens_per_step, one) for one in per_chunk)


def chunk_mark(config: OffloadingConfig) -> str:
    """Return the ending of a cache's name that tells caches of larger chunks apart."""
    blocks = config.cache.blocks_per_chunk
    return "" if blocks == 1 else f"-x{blocks}"


def pool_inputs(config: OffloadingConfig, num_engine_blocks: int, pool_bytes: int) -> PlanInputs:
    """Return the inputs to register the cache with.

    `pool_bytes` is for all ranks together; 0 means ENGINE_CACHES times the engine's own cache. One layer stands for
    everything that a rank keeps, as the daemon needs to know only the bytes of a row.
    """
    tokens = tokens_per_chunk(config)
    ranks = config.parallel.world_size
    row = bytes_per_row(config) * ranks
    num_rows = floor_div(pool_bytes, row) or ceil_div(
        ENGINE_CACHES * num_engine_blocks, config.cache.blocks_per_chunk
    )
    # A pool at a plan's limits is larger than any machine's memory; the daemon refuses it, and says how much it has.
    num_rows = min(num_rows, BLOCKS_MAX, floor_div(BYTES_MAX, row))
    layer = FullAttention(
        name="chunks",
        num_kv_heads=1,
        head_size=1,
        head_size_v=0,
        dtype="uint8",
        bytes_per_state_packed=bytes_per_state(config),
        tokens_per_block=tokens,
    )
    return PlanInputs(
        layers=(layer,),
        tokens_per_block=tokens,
        device_blocks=num_rows,
        block_multiple_bytes=ROW_MULTIPLE_BYTES,
        parallel=ParallelInputs(tensor_ranks=ranks),
    )


def too_small(config: OffloadingConfig, pool_bytes: int) -> str:
    """Return why no chunk fits into the pool that was asked for, and what to change; empty if one fits."""
    need = bytes_per_row(config) * config.parallel.world_size
    if not pool_bytes or pool_bytes >= need:
        return ""
    return (
        f"pool_bytes is {pool_bytes}, but one chunk takes {need} bytes; set it to many times that, or leave it out for "
        f"{ENGINE_CACHES} times the engine's own cache"
    )


def no_room(
    config: OffloadingConfig, inputs: PlanInputs, pool_bytes: int
) -> Callable[[NeverFitsError], str]:
    """Return a function that says that the daemon has no memory for the pool and the host pool, and what would fit."""

    def said(error: NeverFitsError) -> str:
        row = bytes_per_row(config) * config.parallel.world_size
        need, available = inputs.device_blocks * row, error.available or 0
        below = max(0, (error.need or 0) - need)
        most = floor_div(max(0, available - below), row) * row
        asked = (
            f"pool_bytes is {pool_bytes}"
            if pool_bytes
            else f"without pool_bytes the pool is {ENGINE_CACHES} times the engine's own cache, {need} bytes"
        )
        beside = f", and the host pool takes {below}" if below else ""
        lower = (
            f"set pool_bytes to at most {most}, " if most else "lower host_bytes, " * bool(below)
        )
        return (
            f"{asked}{beside}; of the {error.limit} bytes of memory that the daemon may use, {available} are left: "
            f"{lower}delete a cache with `kvlease delete`, or raise the daemon's memory_bytes_max"
        )

    return said


def row_disagreements(config: OffloadingConfig) -> Callable[[CachePlan], Sequence[str]]:
    """Return a function that compares a cache's rows with this engine's; the number of rows may differ."""

    def disagreements(plan: CachePlan) -> list[str]:
        pairs = [
            ("ranks", len(plan.ranks), config.parallel.world_size),
            ("tokens of a chunk", plan.tokens_per_block, tokens_per_chunk(config)),
            *(
                (f"bytes of a row of rank {rank.rank}", rank.bytes_per_block, bytes_per_row(config))
                for rank in plan.ranks
            ),
        ]
        return [
            f"{what}: {theirs} in the cache's plan, {own} here"
            for what, theirs, own in pairs
            if theirs != own
        ]

    return disagreements
