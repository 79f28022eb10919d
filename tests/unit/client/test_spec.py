"""Laws of what a layer keeps: every number follows from the fields, and contradictory fields are refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.spec import (
    BYTES_PER_ELEMENT,
    KINDS,
    MLA,
    QUANTISATIONS,
    EncoderOnly,
    FullAttention,
    LayerSpec,
    RetainedWindow,
    RingState,
    SinkAttention,
    SlidingWindow,
    SlidingWindowMLA,
    StateSpace,
    spec_from_fields,
    spec_to_fields,
)
from kvlease.spec.fields import FIELDS
from kvlease.wire.faults import error_to_proto

HEADS = {"name": "0", "num_kv_heads": 2, "head_size": 32, "dtype": "float16"}
EXTRA: dict[str, dict[str, Any]] = {
    "sliding_window": {"window_tokens": 128},
    "chunked_local": {"chunk_tokens": 64},
    "sliding_window_mla": {"window_tokens": 128},
    "sink_attention": {"sink_tokens": 4},
    "retained_window": {"retained_window_tokens": 8},
}


def layer(kind: str = "full_attention", **changes: Any) -> LayerSpec:
    """Return a valid layer of a kind with some fields changed; its block covers 16 tokens."""
    if kind == "state_space":
        fields: dict[str, Any] = {"name": "0", "shapes": ((3, 4),), "dtypes": ("float32",)}
    else:
        fields = HEADS | EXTRA.get(kind, {})
        if KINDS[kind].is_latent:
            fields = fields | {"num_kv_heads": 1}
    return KINDS[kind](**({"tokens_per_block": 16} | fields | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_laid_out(kind: str) -> None:
    """A plain layer of every kind passes its own check, and its page has room for its content."""
    spec = layer(kind)

    spec.check()

    assert spec.bytes_per_page >= spec.content_bytes_per_page > 0
    assert spec.explicit(8) == spec.explicit(8).explicit(4)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_say_all_of_a_spec(kind: str) -> None:
    """A spec that is written as named fields and read again is the same, with its name."""
    spec = layer(kind, backend="B")

    again = spec_from_fields(spec_to_fields(spec))

    assert (again, again.name, again.backend) == (spec, spec.name, spec.backend)


@pytest.mark.parametrize("kind", KINDS)
def test_names_do_not_tell_layers_apart(kind: str) -> None:
    """Layers that keep the same are equal under different names, and differ where they keep different bytes."""
    assert layer(kind) == layer(kind, name="other")
    assert hash(layer(kind)) == hash(layer(kind, name="other"))
    assert layer(kind) != layer(kind, tokens_per_block=32)


def test_open_block_takes_the_plans() -> None:
    """A layer without a block size takes the plan's; a layer with its own block size keeps it."""
    assert layer(tokens_per_block=None).explicit(64).block_tokens == 64
    assert layer().explicit(64).block_tokens == 16
    assert layer("state_space", tokens_per_block=None).explicit(64).block_tokens == 64


@pytest.mark.parametrize(
    ("quantisation", "slots", "bytes_per_state"),
    [
        ("none", 2, 128),
        ("fp8_per_tensor", 2, 128),
        ("int8_per_token_head", 2, 136),
        ("int4_per_token_head", 2, 40),
        ("nvfp4", 4, 18),
    ],
)
def test_quantisation_decides_the_bytes_of_a_state(
    quantisation: str, slots: int, bytes_per_state: int
) -> None:
    """A page is head_slots * states * bytes per state, and quantisation decides the first and the last factor."""
    spec = layer(quantisation=quantisation)

    assert (spec.head_slots, spec.bytes_per_state) == (slots, bytes_per_state)
    assert spec.bytes_per_page == slots * 16 * bytes_per_state


def test_backend_packs_a_state_as_it_says() -> None:
    """Bytes and head slots that a backend gives replace those that the dtype would give."""
    spec = layer(bytes_per_state_packed=10, num_head_slots=3)

    assert (spec.head_slots, spec.bytes_per_state) == (3, 10)


@pytest.mark.parametrize(("head_size_v", "bytes_per_state"), [(None, 128), (16, 96), (0, 64)])
def test_v_is_as_k_where_nothing_is_said(head_size_v: int | None, bytes_per_state: int) -> None:
    """V's head is K's by default, its own size where one is given, and absent where that size is 0."""
    assert layer(head_size_v=head_size_v).bytes_per_state == bytes_per_state


def test_compressed_layer_counts_states() -> None:
    """At 128 tokens a state a block of 256 tokens keeps two states, and its page is padded to the kernels' multiple."""
    spec = MLA(
        name="0",
        head_size=512,
        dtype="uint8",
        bytes_per_state_packed=584,
        tokens_per_block=256,
        tokens_per_state=128,
        page_multiple_bytes=576,
    )

    assert (spec.states_per_block, spec.content_bytes_per_page) == (2, 1168)
    assert spec.bytes_per_page == 1728


def test_several_states_of_a_token_are_counted() -> None:
    """A token that stands for four positions has four states."""
    assert layer("sliding_window", states_per_token=4).states_per_block == 64


def test_padding_of_an_aligned_page_stands_where_alignment_changes_nothing() -> None:
    """A page with aligned content keeps the padding that it was given."""
    fields = {"name": "0", "head_size": 64, "dtype": "float16", "tokens_per_block": 4}

    assert MLA(**fields, page_multiple_bytes=512).bytes_per_page == 512
    assert MLA(**fields, page_multiple_bytes=512, bytes_per_page_padded=640).bytes_per_page == 640


def test_state_space_adds_up_its_tensors() -> None:
    """A state's bytes are the sum over its tensors; it is one state of one head, whatever the block size."""
    spec = StateSpace(
        name="0", shapes=((3, 4), (2,)), dtypes=("float32", "bfloat16"), tokens_per_block=99
    )

    assert (spec.bytes_per_page, spec.states_per_block, spec.bytes_per_element) == (52, 1, 1)
    assert not spec.is_context_sharded


@pytest.mark.parametrize(
    ("changes", "multiple"),
    [
        ({}, 1),
        ({"block_stride_multiple_bytes": 100}, 100),
        ({"block_stride_multiple_tokens": 64}, 1),
        ({"block_stride_multiple_tokens": 24}, 2048),
    ],
)
def test_blocks_lie_a_multiple_apart(changes: dict[str, int], multiple: int) -> None:
    """The stride's multiple is given in bytes, or in tokens: then it is the page of gcd(those, the block's tokens)."""
    spec = layer(**changes)

    assert spec.block_stride_multiple == multiple
    assert spec.padded_bytes_per_page % multiple == 0


def test_rings_and_replayed_windows_are_not_cached() -> None:
    """What is overwritten, or computed anew after a hit, is of no use to another request, and is not cached."""
    window = {"name": "0", "head_size": 8, "dtype": "uint8", "window_tokens": 8}

    assert not layer("ring_state").is_prefix_cacheable
    assert not RingState.has_token_slots
    assert SlidingWindowMLA(**window).is_prefix_cacheable
    assert not SlidingWindowMLA(**window, is_replayed=True).is_prefix_cacheable


@pytest.mark.parametrize("dtype", BYTES_PER_ELEMENT)
@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_known_types_pass(dtype: str, quantisation: str) -> None:
    """Every dtype and every quantisation of the tables can be laid out."""
    layer(dtype=dtype, quantisation=quantisation).check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("name", "", id="empty name"),
        pytest.param("name", "x" * 257, id="long name"),
        pytest.param("name", "a\nb", id="unprintable name"),
        pytest.param("num_kv_heads", 0, id="no heads"),
        pytest.param("num_kv_heads", 2**17, id="too many heads"),
        pytest.param("num_kv_heads", True, id="a bool for a number"),
        pytest.param("head_size", -1, id="negative head"),
        pytest.param("head_size_v", -1, id="negative V head"),
        pytest.param("head_size", 1.5, id="half an element"),
        pytest.param("dtype", "int7", id="unknown dtype"),
        pytest.param("quantisation", "half", id="unknown quantisation"),
        pytest.param("tokens_per_state", 0, id="no tokens per state"),
        pytest.param("block_stride_multiple_bytes", 0, id="no stride"),
        pytest.param("block_stride_multiple_tokens", -1, id="negative stride"),
        pytest.param("bytes_per_page_padded", 100, id="padding below the content"),
    ],
)
def test_malformed_layer_is_refused_by_name(field: str, value: object) -> None:
    """A layer that cannot be laid out is refused, and the refusal names the field."""
    with pytest.raises(InvalidError) as refusal:
        layer(**{field: value}).check()

    assert refusal.value.resource == field


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("full_attention", {"tokens_per_block": 0}),
        ("full_attention", {"window_tokens": 0}),
        ("full_attention", {"tensor_shards_max": 0}),
        (
            "full_attention",
            {"block_stride_multiple_bytes": 8, "block_stride_multiple_tokens": 8},
        ),
        ("full_attention", {"tokens_per_state": 2, "states_per_token": 2}),
        ("mla", {"tokens_per_state": 32}),
        ("mla", {"page_multiple_bytes": 0}),
        ("sliding_window", {"window_tokens": 0}),
        ("sliding_window_mla", {"retained_tokens": -1}),
        ("chunked_local", {"chunk_tokens": 0}),
        ("sink_attention", {"sink_tokens": 0}),
        ("retained_window", {"retained_window_tokens": 0}),
        ("state_space", {"shapes": (), "dtypes": ()}),
        ("state_space", {"dtypes": ()}),
        ("state_space", {"shapes": ((),)}),
        ("state_space", {"shapes": ((0,),)}),
        ("state_space", {"dtypes": ("int7",)}),
        ("state_space", {"num_checkpoint_blocks": -1}),
        ("state_space", {"bytes_per_page_padded": 8}),
    ],
)
def test_contradiction_is_refused(kind: str, changes: dict[str, Any]) -> None:
    """Fields that are out of range, or contradict each other, are refused for every kind."""
    with pytest.raises(InvalidError):
        layer(kind, **changes).check()


def test_block_without_a_state_is_refused_with_the_remedy() -> None:
    """A block shorter than one compressed state keeps nothing; the refusal names both numbers and the multiple."""
    with pytest.raises(InvalidError) as refusal:
        layer("mla", tokens_per_block=96, tokens_per_state=128).check()

    assert (refusal.value.need, refusal.value.available) == (128, 96)
    assert refusal.value.rule == "block_without_states"
    assert "multiple of 128" in refusal.value.message


def test_open_block_is_checked_once_it_is_known() -> None:
    """A field that depends on the block size is not refused before that size is known."""
    open_block = layer("mla", tokens_per_block=None, tokens_per_state=128)

    open_block.check()
    with pytest.raises(InvalidError):
        open_block.explicit(96).check()


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"kind": "imaginary", "name": "0"}, "unknown_kind"),
        ({"kind": "full_attention"} | HEADS | {"chunks": 2}, "unknown_field"),
        ({"kind": "full_attention", "name": "0"}, "missing_field"),
    ],
)
def test_fields_that_describe_no_spec_are_refused(fields: dict[str, Any], rule: str) -> None:
    """An unknown kind, a field that the kind lacks, and a missing field are each refused by name."""
    with pytest.raises(InvalidError) as refusal:
        spec_from_fields(fields)

    assert refusal.value.rule == rule


@pytest.mark.parametrize(
    ("kind", "changes", "resource"),
    [
        pytest.param("state_space", {"shapes": 3}, "shapes", id="a number for a list"),
        pytest.param("state_space", {"shapes": [3]}, "shapes[0]", id="a number for a list in it"),
        pytest.param("state_space", {"shapes": [[3, "x"]]}, "shapes[0][1]", id="a text in it"),
        pytest.param("state_space", {"dtypes": "bfloat16"}, "dtypes", id="a text for a list"),
        pytest.param("state_space", {"dtypes": [None]}, "dtypes[0]", id="nothing in a list"),
        pytest.param("mla", {"dtype": None}, "dtype", id="no dtype"),
        pytest.param("mla", {"dtype": 1}, "dtype", id="a number for a dtype"),
        pytest.param("mla", {"quantisation": 3}, "quantisation", id="a number for a word"),
        pytest.param("mla", {"backend": 3}, "backend", id="a number for a backend"),
        pytest.param("mla", {"name": 7}, "name", id="a number for a name"),
        pytest.param("mla", {"role": {}}, "role", id="an object for a word"),
        pytest.param("mla", {"is_context_sharded": None}, "is_context_sharded", id="no bool"),
        pytest.param("mla", {"is_context_sharded": 2**53}, "is_context_sharded", id="large bool"),
        pytest.param("mla", {"head_size": True}, "head_size", id="a bool for a number"),
        pytest.param("mla", {"tensor_shards_max": False}, "tensor_shards_max", id="false for 0"),
        pytest.param(
            "mla",
            {"block_stride_multiple_bytes": "x"},
            "block_stride_multiple_bytes",
            id="a text for a number",
        ),
        pytest.param(
            "mla",
            {"block_stride_multiple_bytes": float("inf")},
            "block_stride_multiple_bytes",
            id="endless",
        ),
    ],
)
def test_field_of_a_wrong_type_is_refused_by_its_place(
    kind: str, changes: dict[str, Any], resource: str
) -> None:
    """A field of the wrong type is refused with the layer's place, the field and the value."""
    fields = spec_to_fields(layer(kind)) | changes

    with pytest.raises(InvalidError, match=r"of layer .* must be .*, not ") as refusal:
        spec_from_fields(fields, "layers[3]")

    assert (refusal.value.resource, refusal.value.rule) == (f"layers[3].{resource}", "wrong_type")


def test_lists_will_do_for_tuples() -> None:
    """Lists in files and tuples in programs mean the same; a spec itself has tuples."""
    fields = {"kind": "state_space", "name": "a", "dtypes": ["int8"], "shapes": [[3, 4]]}

    assert spec_from_fields(fields) == spec_from_fields(
        fields | {"dtypes": ("int8",), "shapes": ((3, 4),)}
    )
    with pytest.raises(InvalidError, match="must be a tuple of lists of integers"):
        layer("state_space", shapes=[[3, 4]]).check()


VALUES = st.one_of(
    st.sampled_from([None, True, False, "", "x", "bfloat16", "nvfp4", "a\nb", "\ud800", "x" * 300]),
    st.sampled_from([-1, 0, 1, 3, 16, 64, 2**16, 2**31, 2**53, 2**63, 2**64, 10**5000]),
    st.sampled_from([1.5, float("inf"), float("nan"), [], {}, [3], [[]], [[1, 2]], ["int8"]]),
)
"""Values that a person may write into a field."""


@settings(max_examples=15 * settings().max_examples, deadline=None)
@given(st.sampled_from(list(KINDS)), st.data())
def test_whatever_is_written_is_laid_out_or_refused(kind: str, data: st.DataObject) -> None:
    """Fields of any types and values either give a layer with a page or are refused; nothing else happens."""
    names = [*FIELDS[kind], "kind", "no_field"]
    written = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=4))

    try:
        spec = spec_from_fields(spec_to_fields(layer(kind, tokens_per_block=None)) | written)
        spec.check()
        spec = spec.explicit(16)
        spec.check()
        spec.check_planned()
    except InvalidError as refusal:
        assert error_to_proto(refusal).rule
        return

    assert 0 < spec.bytes_per_page <= spec.padded_bytes_per_page


@pytest.mark.parametrize("tokens_per_state", [3, 5])
def test_state_that_does_not_divide_its_block_has_no_place(tokens_per_state: int) -> None:
    """A layer with such states has sizes but no place; the refusal names both numbers and the next block sizes."""
    spec = layer("mla", tokens_per_state=tokens_per_state)

    spec.check()
    with pytest.raises(
        InvalidError, match=r"have 15 and 1[58] tokens|have 15 and 20 tokens"
    ) as told:
        spec.check_planned()

    assert told.value.rule == "tokens_per_state_does_not_divide"
    assert (told.value.need, told.value.available) == (tokens_per_state, 16)


def test_state_that_divides_its_block_has_a_place() -> None:
    """Layers whose states fill their blocks, and layers without states, pass."""
    layer("mla", tokens_per_state=4).check_planned()
    layer("state_space").check_planned()


@pytest.mark.parametrize("kind", ["mla", "sliding_window_mla"])
def test_latent_has_one_head(kind: str) -> None:
    """One latent vector stands for all heads; hidden states count theirs."""
    with pytest.raises(InvalidError) as refusal:
        layer(kind, num_kv_heads=2).check()

    assert refusal.value.rule == "latent_has_one_head"
    layer("hidden_state", num_kv_heads=3).check()


def test_stride_of_less_than_a_state_is_refused() -> None:
    """A multiple of fewer tokens than a state's is refused: pages cannot lie a multiple of no bytes apart."""
    with pytest.raises(InvalidError) as refusal:
        layer("mla", tokens_per_state=4, block_stride_multiple_tokens=2).check()

    assert refusal.value.rule == "block_stride_multiple_without_states"


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(layer(head_size=0), id="a count"),
        pytest.param(layer(dtype="int7"), id="a dtype"),
        pytest.param(layer(quantisation="half"), id="a quantisation"),
        pytest.param(layer(block_stride_multiple_bytes=0), id="a stride"),
        pytest.param(layer(block_stride_multiple_tokens=2**31), id="a large stride"),
        pytest.param(
            layer(num_head_slots=2**16, head_size=2**20, tokens_per_block=2**31 - 1), id="a page"
        ),
        pytest.param(layer("state_space", shapes=()), id="no shapes"),
        pytest.param(layer("state_space", shapes=((),)), id="no extents"),
        pytest.param(layer("state_space", shapes=((0,),)), id="an extent"),
        pytest.param(layer("state_space", shapes=((2**31 - 1,) * 3,)), id="a state"),
        pytest.param(
            layer("state_space", shapes=((2**31 - 1,) * 8,), bytes_per_page_padded=8),
            id="a padded state",
        ),
        pytest.param(layer("state_space", dtypes=("int7",)), id="a state's dtype"),
        pytest.param(layer("state_space", dtypes=("\n",)), id="no text"),
    ],
)
def test_refusal_names_the_layer(spec: LayerSpec) -> None:
    """Whatever is out of range, the refusal names the layer."""
    with pytest.raises(InvalidError, match="of layer '0'"):
        spec.check()


def test_families_keep_what_they_say() -> None:
    """Kinds that keep every token say so; windows, states and encoders do not."""
    keeping = {kind for kind, spec in KINDS.items() if spec.keeps_all}

    assert keeping == {
        spec.kind for spec in (FullAttention, MLA, SinkAttention, RetainedWindow)
    } | {"hidden_state"}
    assert not SlidingWindow.keeps_all
    assert not EncoderOnly.keeps_all


def test_none_that_is_no_default_can_be_said() -> None:
    """A None that is no default survives the named fields: a latent layer's own V, or its split by every rank."""
    spec = layer("mla", head_size_v=None, tensor_shards_max=None)

    again = spec_from_fields(spec_to_fields(spec))

    assert again.explicit(16) == spec.explicit(16)
