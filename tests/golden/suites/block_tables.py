"""Answer the vectors of block tables: rows, their widths, kernel blocks and slots."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlease.geometry import exact_div
from kvlease.rows import BlockRows
from kvlease.slots import NO_SLOT, WHOLE, ContextShard, TokenRuns, run_slots, state_slots
from kvlease.tables import NO_ROW, kernel_block_ids
from kvlease.tables import table_width as width_of

_ROW_MULTIPLE_TOKENS = 128
"""The reference rounds rows to this many tokens, so that its kernels read whole stretches of them."""


def block_table_width(given: dict[str, Any]) -> dict[str, Any]:
    """Return the number of entries of a row."""
    width = width_of(given["max_num_blocks"], given["block_size"], given["token_alignment"])
    return {"width": width}


def expand_block_table(given: dict[str, Any]) -> dict[str, Any]:
    """Return a table in kernel blocks."""
    per_block = exact_div(given["block_size"], given["kernel_block_size"])
    ids = kernel_block_ids(
        np.asarray(given["block_table"], dtype=np.int32),
        per_block,
        given["kernel_block_stride"] or None,
    )
    return {"kernel_block_table": ids.tolist(), "blocks_per_kv_block": per_block}


def row_ops(given: dict[str, Any]) -> dict[str, Any]:
    """Return a table after some changes to its rows."""
    rows = BlockRows(given["num_rows"], given["width"])
    for name, *arguments in given["ops"]:
        _change(rows, name, arguments)
    return {
        "block_table": rows.block_ids.tolist(),
        "num_blocks_per_row": rows.num_blocks.tolist(),
    }


def _change(rows: BlockRows, name: str, arguments: list[Any]) -> None:
    """Make one change; the reference gives the ids before the row."""
    if name == "add_row":
        rows.add(arguments[1], arguments[0])
    elif name == "append_row":
        rows.append(arguments[1], arguments[0])
    elif name == "move_row":
        rows.move(*arguments)
    elif name == "swap_row":
        rows.swap(*arguments)
    else:
        rows.clear(*arguments)


def slot_mapping_single(given: dict[str, Any]) -> dict[str, Any]:
    """Return a table of one group, and the slots of a step's tokens."""
    width = width_of(given["max_num_blocks_per_req"], given["block_size"], _ROW_MULTIPLE_TOKENS)
    rows = BlockRows(max(1, len(given["rows"])), width)
    for row, ids in enumerate(given["rows"]):
        rows.add(row, ids)
    runs = _runs(range(len(given["rows"])), given["start_positions"], given["query_lens"])
    slots = run_slots(
        rows.block_ids,
        runs,
        tokens_per_block=given["block_size"],
        num_padded=given["max_num_batched_tokens"],
        shard=_shard(given),
    )
    return {
        "block_table_width": width,
        "block_table": rows.block_ids[: len(given["rows"])].tolist(),
        "slot_mapping": slots.tolist(),
    }


def tables_multi_group(given: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of several groups after some steps, in the form that one step's requests need."""
    groups = [
        BlockRows(given["max_num_reqs"], width) for width in given["max_num_blocks_per_group"]
    ]
    for step in given["appends"]:
        for row, ids_by_group, overwrites in step:
            for rows, ids in zip(groups, ids_by_group, strict=True):
                if overwrites:
                    rows.add(row, ids)
                else:
                    rows.append(row, ids)
    requests = given["idx_mapping"]
    padded = [*requests, *[NO_ROW] * (given["num_reqs_padded"] - len(requests))]
    return {
        "num_blocks": [rows.num_blocks.tolist() for rows in groups],
        "gathered": [rows.gather(padded).tolist() for rows in groups],
        "slot_mappings": [
            _group_slots(given, index, rows.block_ids).tolist() for index, rows in enumerate(groups)
        ],
    }


def _group_slots(
    given: dict[str, Any], index: int, block_table: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return the slots of a step's tokens in one group, which may have none, or be whole on every rank."""
    enabled, sharded = given["slot_mapping_enabled"], given["dcp_sharded"]
    if enabled is not None and not enabled[index]:
        return np.full(given["num_tokens_padded"], NO_SLOT, dtype=np.int64)
    return run_slots(
        block_table,
        _runs(given["idx_mapping"], given["start_positions"], given["query_lens"]),
        tokens_per_block=given["block_sizes"][index],
        num_padded=given["num_tokens_padded"],
        shard=_shard(given) if sharded is None or sharded[index] else WHOLE,
    )


def compressed_slot_mapping(given: dict[str, Any]) -> dict[str, Any]:
    """Return the slots of compressed states."""
    lengths = given["query_lens"]
    firsts = [end - count for end, count in zip(given["seq_lens"], lengths, strict=True)]
    slots = state_slots(
        np.asarray(given["slot_mapping"], dtype=np.int64),
        np.asarray(given["block_table"], dtype=np.int32),
        _runs(range(len(lengths)), firsts, lengths),
        tokens_per_state=given["compress_ratio"],
        states_per_block=given["storage_block_size"],
        shard=ContextShard(
            num_ranks=given["cp_world_size"], interleave_tokens=given["cp_interleave"]
        ),
    )
    return {"compressed_slot_mapping": slots.tolist()}


def _runs(rows: Sequence[int], firsts: Sequence[int], lengths: Sequence[int]) -> TokenRuns:
    return TokenRuns(rows=list(rows), first_positions=firsts, num_tokens=lengths)


def _shard(given: dict[str, Any]) -> ContextShard:
    return ContextShard(
        num_ranks=given["cp_world_size"],
        rank=given["cp_rank"],
        interleave_tokens=given["cp_interleave"],
    )
