"""Own the translation between the reference's words and ours; no rule of planning belongs here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvlease.errors import KVLeaseError
from kvlease.plan import EngineInputs, ParallelInputs, PlanInputs, RankInputs
from kvlease.spec import AttentionSpec, LayerSpec, spec_from_fields
from kvleased.planning.groups.grouping import Group

KIND_OF_TYPE = {
    "full_attention": "full_attention",
    "sliding_window": "sliding_window",
    "chunked_local_attention": "chunked_local",
    "mla_attention": "mla",
    "sliding_window_mla": "sliding_window_mla",
    "mamba": "state_space",
    "cross_attention": "cross_attention",
    "encoder_only_attention": "encoder_only",
    "sink_full_attention": "sink_attention",
    "rswa": "retained_window",
    "circular_buffer": "ring_state",
    "hidden_state": "hidden_state",
}
TYPE_OF_KIND = {kind: name for name, kind in KIND_OF_TYPE.items()}

_KIND_WORD_OF_TYPE = {
    "rswa": "full_attention",
    "hidden_state": "mla_attention",
    "circular_buffer": "unknown",
}
"""The reference's word for the kind of a layer, where it is not the type's name."""

_FIELD_OF_WORD = {
    "block_size": "tokens_per_block",
    "page_size_padded": "bytes_per_page_padded",
    "state_content_bytes": "bytes_per_state_packed",
    "max_tp_shards": "tensor_shards_max",
    "dcp_sharded": "is_context_sharded",
    "sliding_window": "window_tokens",
    "attention_chunk_size": "chunk_tokens",
    "extra_retained_tokens": "retained_tokens",
    "cache_dtype_str": "packed_format",
    "alignment": "page_multiple_bytes",
    "cache_role": "role",
    "is_index_group_leader": "leads_index_group",
    "non_causal_multi_token_decode": "decodes_several_tokens",
    "bounded_replay": "is_replayed",
    "sink_len": "sink_tokens",
    "rswa_window": "retained_window_tokens",
    "num_prefill_checkpoint_blocks": "num_checkpoint_blocks",
    "prefill_checkpoint_alignment": "checkpoint_multiple_tokens",
    "tp_replicated": "is_replicated",
}
"""Words that only have another name here; words that are not in this table keep theirs."""

_KIND_HAS_NO = {
    "state_space": ("dcp_sharded", "mamba_cache_mode", "mamba_type", "num_heads"),
}
"""Words that do not change a kind's bytes here: a state is whole on every rank, and its mode is the engine's."""

_EMPTY_WHEN_NULL = ("packed_format", "model_version")
"""Names that are empty here where the reference has null."""

_CLASS_OF_RULE = {
    "block_stride_multiple_not_positive": "BAD_BLOCK_STRIDE_ALIGNMENT",
    "unknown_kind": "UNREGISTERED_SPEC",
    "blocks_per_slot_not_positive": "OFFLOAD_BLOCKS_PER_CHUNK_NOT_POSITIVE",
}
"""Classes of errors whose name in the reference is not our rule in capitals."""

_NUMBER_OF_REFUSAL = {"NOT_ENOUGH_MEMORY": "estimated_max_model_len"}
"""The name that the reference has for a refusal's number, which is the error's `limit` here."""


def error_words(refusal: KVLeaseError) -> dict[str, Any]:
    """Return the words of a refusal in a vector, and our own words beside them."""
    rule = refusal.rule or refusal.code
    name = _CLASS_OF_RULE.get(rule, rule.upper())
    words: dict[str, Any] = {
        "type": type(refusal).__name__,
        "class": name,
        "message": refusal.message,
    }
    if name in _NUMBER_OF_REFUSAL:
        words[_NUMBER_OF_REFUSAL[name]] = refusal.limit
    return words


def spec_of(words: Mapping[str, Any], name: str = "layer") -> LayerSpec:
    """Return our spec of a layer.

    Raises:
        InvalidError: there is no such kind of layer, or it has no such field.
    """
    kind = KIND_OF_TYPE.get(words["type"], words["type"])
    fields: dict[str, Any] = {"kind": kind, "name": name}
    for word, value in words.items():
        if word == "type" or word in _KIND_HAS_NO.get(kind, ()):
            continue
        fields.update(_field(word, value))
    spec = spec_from_fields(fields)
    return _with_plain_packing(spec) if isinstance(spec, AttentionSpec) else spec


def kind_word(spec: LayerSpec) -> str:
    """Return the reference's word for the kind of a layer."""
    name = TYPE_OF_KIND[spec.kind]
    return _KIND_WORD_OF_TYPE.get(name, name)


def _field(word: str, value: Any) -> dict[str, Any]:
    """Return our field, or fields, for one word and its value."""
    if word == "kv_quant_mode":
        return {"quantisation": value.lower()}
    if word == "non_causal":
        return {"is_causal": not value}
    if word == "tokens_per_state" and isinstance(value, str):
        tokens, states = value.split("/")
        return {"tokens_per_state": int(tokens), "states_per_token": int(states)}
    if word == "block_stride_alignment" and isinstance(value, Mapping):
        return {"block_stride_multiple_tokens": value["multiple_of"]}
    if word == "block_stride_alignment":
        return {"block_stride_multiple_bytes": value}
    name = _FIELD_OF_WORD.get(word, word)
    return {name: "" if value is None and name in _EMPTY_WHEN_NULL else value}


def _with_plain_packing(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec with explicit bytes and slots where the reference uses its plain rule."""
    if spec.quantisation == "none":
        return spec
    plain = replace(spec, quantisation="none")
    return replace(
        spec,
        num_head_slots=spec.num_head_slots or plain.head_slots,
        bytes_per_state_packed=spec.bytes_per_state_packed or plain.bytes_per_state,
    )


def spec_words(spec: LayerSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return our spec in the reference's words, those of `given`, the spec from which ours was made."""
    words: dict[str, Any] = {"type": TYPE_OF_KIND[spec.kind]}
    for word, value in given.items():
        if word != "type":
            words[word] = _word(spec, word, value)
    return words


def _word(spec: LayerSpec, word: str, given: Any) -> Any:
    """Return the reference's value of one word; `given` is the spec's value before planning."""
    if word in _KIND_HAS_NO.get(spec.kind, ()):
        return given
    if word in _WORDS_OF_THEIR_OWN:
        return _WORDS_OF_THEIR_OWN[word](spec, given)
    found = getattr(spec, _FIELD_OF_WORD.get(word, word))
    return None if found == "" else _listed(found)


def _listed(value: Any) -> Any:
    return [_listed(entry) for entry in value] if isinstance(value, tuple) else value


def _of_attention(spec: LayerSpec) -> AttentionSpec:
    assert isinstance(spec, AttentionSpec), "only kinds of attention have the word"
    return spec


def _padded_page(spec: LayerSpec, _given: Any) -> int | None:
    page, content = spec.bytes_per_page, spec.content_bytes_per_page
    return page if page != content else spec.bytes_per_page_padded


def _tokens_per_state(spec: LayerSpec, given: Any) -> int | str:
    found = _of_attention(spec)
    if isinstance(given, str):
        return f"{found.tokens_per_state}/{found.states_per_token}"
    return found.tokens_per_state


def _stride_alignment(spec: LayerSpec, _given: Any) -> int | dict[str, int] | None:
    tokens = spec.block_stride_multiple_tokens
    return {"multiple_of": tokens} if tokens else spec.block_stride_multiple_bytes


def _plain(spec: LayerSpec) -> AttentionSpec:
    """Return an attention layer by the reference's plain rule, which it uses where nothing else is given."""
    return replace(
        _of_attention(spec), quantisation="none", num_head_slots=None, bytes_per_state_packed=None
    )


def _slots_word(spec: LayerSpec, given: Any) -> int | None:
    """Return the head slots, or null where `_with_plain_packing` filled in those of the plain rule."""
    slots = _of_attention(spec).num_head_slots
    return None if given is None and slots == _plain(spec).head_slots else slots


def _content_word(spec: LayerSpec, given: Any) -> int | None:
    """Return the bytes of a state, or null where `_with_plain_packing` filled in those of the plain rule."""
    packed = _of_attention(spec).bytes_per_state_packed
    return None if given is None and packed == _plain(spec).bytes_per_state else packed


_WORDS_OF_THEIR_OWN: Mapping[str, Callable[[LayerSpec, Any], Any]] = {
    "kv_quant_mode": lambda spec, _: _of_attention(spec).quantisation.upper(),
    "non_causal": lambda spec, _: not getattr(spec, "is_causal", True),
    "page_size_padded": _padded_page,
    "num_head_slots": _slots_word,
    "state_content_bytes": _content_word,
    "tokens_per_state": _tokens_per_state,
    "head_size_v": lambda spec, _: _of_attention(spec).value_head_size,
    "block_stride_alignment": _stride_alignment,
}
"""Words for which we have no single field."""


def layers_of(
    layers: Sequence[Sequence[str]], specs: Mapping[str, Mapping[str, Any]]
) -> tuple[LayerSpec, ...]:
    """Return our layers from pairs of a layer's name and the name of its spec."""
    return tuple(spec_of(specs[spec], name) for name, spec in layers)


def engine_of(config: Mapping[str, Any]) -> EngineInputs:
    """Return the settings of a vector's engine."""
    return EngineInputs(
        tokens_per_step=config["max_num_batched_tokens"],
        steps_in_flight=config["max_concurrent_batches"],
        lookahead_tokens=config["num_prefill_lookahead_tokens"],
        encoder_tokens_max=config["max_num_encoder_input_tokens"],
        state_mode=config["mamba_cache_mode"],
        prefix_caching=config["enable_prefix_caching"],
        has_connector=config["kv_connector"],
        match_tokens=config["prefix_match_unit"],
        one_group=config["disable_hybrid_kv_cache_manager"],
        drafts_with_last_layer=config["mtp_speculative"],
    )


def parallel_of(config: Mapping[str, Any]) -> ParallelInputs:
    """Return the split of a vector's model."""
    return ParallelInputs(
        tensor_ranks=config["tensor_parallel_size"],
        pipeline_ranks=config["pipeline_parallel_size"],
        context_ranks=config["decode_context_parallel_size"],
    )


def ranks_of(given: Mapping[str, Any]) -> tuple[RankInputs, ...]:
    """Return every rank of a vector, with its own layers and bytes."""
    workers = given["workers"]
    overrides = given["config"]["num_gpu_blocks_override"] is not None
    ranks = []
    for worker in workers:
        source = workers[worker["layers_same_as"]] if "layers_same_as" in worker else worker
        layers = layers_of(source["layers"], given["specs"])
        ranks.append(
            RankInputs(
                # With an override of blocks, the reference ignores how much memory there is.
                device_bytes=None if overrides else worker["available_memory_bytes"],
                layers=layers,
                keeps_nothing=not layers,
            )
        )
    return tuple(ranks)


def plan_inputs_of(given: Mapping[str, Any]) -> PlanInputs:
    """Return the inputs of a vector's plan: tables are padded with block 0, and blocks are as large as their pages."""
    config = given["config"]
    ranks = ranks_of(given)
    return PlanInputs(
        layers=next((rank.layers for rank in ranks if rank.layers), ()),
        tokens_per_block=config["block_size"],
        layout=config["kv_cache_layout"],
        device_blocks=config["num_gpu_blocks_override"] or 0,
        null_blocks=1,
        block_multiple_bytes=1,
        longest_request_tokens=config["max_model_len"],
        fit_longest_request=config["auto_fit_max_model_len"],
        engine=engine_of(config),
        parallel=parallel_of(config),
        ranks=ranks,
    )


def groups_of(
    groups: Sequence[Sequence[Sequence[str]]], specs: Mapping[str, Mapping[str, Any]]
) -> tuple[Group, ...]:
    """Return the groups as a vector gives them."""
    return tuple(Group(layers=layers_of(group, specs), is_drafted=False) for group in groups)
