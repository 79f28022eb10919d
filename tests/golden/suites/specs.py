"""Answer the vectors of single specs: their numbers, what merges, and what shares a table."""

from typing import Any

from kvlease.errors import KVLeaseError
from kvlease.spec import LayerSpec, RingState, StateSpace
from kvlease.tables import table_width
from kvleased.planning.demand import Demand, blocks_per_request, ranks_sharing, table_blocks
from kvleased.planning.groups.merging import merged, share_table
from tests.golden.words import engine_of, error_words, kind_word, spec_of, spec_words

_ROW_MULTIPLE_TOKENS = 128


def spec_metrics(given: dict[str, Any]) -> dict[str, Any]:
    """Return every number of one layer."""
    spec = spec_of(given["spec"])
    spec.check()
    demand = demand_of(given["config"])
    words = spec_words(spec, given["spec"])
    blocks = blocks_per_request(spec, demand)
    entries = table_blocks(spec, demand)
    return {
        "page_size_bytes": spec.bytes_per_page,
        "unpadded_page_size_bytes": spec.content_bytes_per_page,
        "storage_block_size": spec.states_per_block,
        "head_slots": spec.head_slots,
        "state_bytes": spec.bytes_per_state,
        "block_stride_alignment_bytes": spec.block_stride_multiple,
        "layer_outer_block_stride": spec.padded_bytes_per_page,
        "prefix_cacheable": spec.is_prefix_cacheable,
        "uses_slot_mapping": spec.has_token_slots,
        "kind": kind_word(spec),
        "tokens_per_block_all_ranks": spec.block_tokens * ranks_sharing(spec, demand.context_ranks),
        "resolved_page_size_padded": words["page_size_padded"],
        "blocks_per_request": blocks,
        "max_memory_usage_bytes": blocks * spec.bytes_per_page,
        "block_table_entries": entries,
        "block_table_width": table_width(entries, spec.block_tokens, _row_multiple_tokens(spec)),
    }


def _row_multiple_tokens(spec: LayerSpec) -> int | None:
    """Return the tokens to which the reference rounds a row, so that its kernels read whole stretches of them."""
    return None if isinstance(spec, StateSpace | RingState) else _ROW_MULTIPLE_TOKENS


def demand_of(config: dict[str, Any]) -> Demand:
    """Return the need of layers for one request of the longest length."""
    engine = engine_of(config)
    return Demand(
        num_tokens=config["max_model_len"],
        in_flight_tokens=engine.steps_in_flight * engine.tokens_per_step,
        context_ranks=config["decode_context_parallel_size"],
        encoder_tokens=engine.encoder_tokens_max,
        state_mode=engine.state_mode,
    )


def merge_specs(given: dict[str, Any]) -> dict[str, Any]:
    """Return the spec that all layers could share, or the refusal, and whether they may share a table."""
    specs = [spec_of(words, f"layer.{index}") for index, words in enumerate(given["specs"])]
    shares = {"is_uniform_type": share_table(specs)}
    try:
        one = merged(specs)
    except KVLeaseError as refusal:
        return {**shares, "error": error_words(refusal)}
    return {**shares, "merged": spec_words(one, given["specs"][0])}
