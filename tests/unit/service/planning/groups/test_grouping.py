"""Laws of grouping: every layer is in one group, and the attempts to make groups have an order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.layout import Layout
from kvlease.spec import EncoderOnly, LayerSpec
from kvleased.planning.groups.grouping import Group
from tests.unit.service.planning.specs import (
    chunk,
    full,
    grouped,
    hidden,
    latent,
    latent_window,
    names,
    states,
    times,
    window,
)

KINDS = st.sampled_from(
    [full(), full("wide", head_size=96), window(), chunk(), latent_window(), states(), hidden()]
)


@given(st.lists(st.tuples(KINDS, st.integers(1, 4)), max_size=4), st.sampled_from(Layout))
def test_every_layer_is_in_one_group(counts: list[tuple[LayerSpec, int]], layout: Layout) -> None:
    """Groups are a partition of the layers, and the layers of a group have one block."""
    layers = [spec for index, (kind, n) in enumerate(counts) for spec in times(kind, n + index)]
    layers = list({layer.name: layer for layer in layers}.values())

    groups = grouped(*layers, layout=layout)

    found = [name for group in groups for name in group.layer_names]
    assert sorted(found) == sorted(layer.name for layer in layers)
    assert all(len({layer.tokens_per_block for layer in group.layers}) == 1 for group in groups)


def test_no_layers_make_no_groups() -> None:
    """A model without attention has no groups."""
    assert grouped() == ()


def test_equal_layers_are_one_group_of_one_spec() -> None:
    """Layers of one spec share one table and one page size."""
    (group,) = grouped(*times(full(), 3))

    assert (group.has_equal_layers, group.bytes_per_page) == (True, 8192)
    assert (group.is_prefix_cacheable, group.is_context_sharded) == (True, True)


def test_layers_of_several_pages_are_one_group_with_their_own_specs() -> None:
    """Layers that share a table keep their pages, and a block has them all."""
    (group,) = grouped(full(), full("b", num_kv_heads=1))

    assert (group.has_equal_layers, group.bytes_per_page) == (False, 8192 + 4096)
    assert group.tokens_on_all_ranks(4) == 64


def test_encoder_only_layer_is_refused() -> None:
    """A layer that keeps nothing cannot be planned."""
    layer = EncoderOnly(name="e", tokens_per_block=16, num_kv_heads=1, head_size=8, dtype="float16")

    with pytest.raises(InvalidError) as refusal:
        grouped(layer)

    assert refusal.value.rule == "unregistered_spec"


def test_windows_retain_what_drafts_take_back() -> None:
    """With a lookahead of n tokens, a window retains n - 1 more tokens, or what its layer asks for if that is more."""
    groups = grouped(window(), window("b", retained_tokens=9, window_tokens=64), lookahead_tokens=4)

    assert [group.spec.retained_tokens for group in groups] == [3, 9]  # type: ignore[attr-defined]


def test_last_layer_marks_its_group_as_drafted() -> None:
    """The last layer is the draft model's."""
    groups = grouped(*times(window(), 2), *times(full(), 2), drafts_with_last_layer=True)

    assert [group.is_drafted for group in groups] == [False, True]


def test_layer_that_decodes_several_tokens_marks_its_group() -> None:
    """A layer that decodes several tokens marks its group, but only if there is a draft model."""
    layers = (latent("draft", head_size=512, decodes_several_tokens=True), window("w"))

    assert [[g.is_drafted for g in grouped(*layers, drafts_with_last_layer=on)] for on in (True, False)] == [
        [True, True],
        [False, False],
    ]  # fmt: skip


def test_hidden_states_are_not_the_last_layer_of_packed_groups() -> None:
    """With packed groups, the draft model's layer is the last one that is no hidden state."""
    layers = (full(), window(head_size=96), hidden())

    groups = grouped(*layers, layout="BLHNC", drafts_with_last_layer=True)

    assert [group.is_drafted for group in groups] == [False, True, False]


def test_group_on_a_rank_keeps_the_ranks_layers() -> None:
    """A group projected on a rank keeps the layers' order and the draft mark."""
    group = Group(layers=tuple(times(full(), 3)), is_drafted=True)

    kept = group.on({"full.2", "full.0", "other"})

    assert (names((kept,)), kept.is_drafted) == ([["full.0", "full.2"]], True)


def test_group_on_a_rank_without_its_layers_keeps_its_spec() -> None:
    """A group without layers on a rank keeps its blocks there, and loses the draft mark."""
    empty = Group(layers=(full(),), is_drafted=True).on(())

    assert (empty.layers, empty.spec, empty.is_drafted) == ((), full(), False)
    assert (empty.tokens_per_block, empty.bytes_per_page) == (16, 8192)


def test_hidden_states_of_several_blocks_have_groups_of_their_own() -> None:
    """Without other layers, hidden states keep their blocks, each in a group of its own."""
    groups = grouped(hidden(), hidden("b", tokens_per_block=32))

    assert [group.tokens_per_block for group in groups] == [16, 32]
