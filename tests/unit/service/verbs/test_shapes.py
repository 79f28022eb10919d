"""Laws of shapes: a core works with the numbers of the plan, group by group."""

from typing import Any

import pytest

from kvlease.errors import InvalidError
from kvlease.groups import GroupShape, Keeps
from kvlease.plan import CachePlan, EngineInputs, ParallelInputs, PlanInputs
from kvlease.spec import CrossAttention, LayerSpec, RingState
from kvleased.config.settings import Settings
from kvleased.core.shape import CacheShape
from kvleased.planning import plan
from kvleased.verbs import plans, shapes
from tests.unit.service.planning.specs import (
    chunk,
    full,
    latent,
    latent_window,
    states,
    window,
)

from .scripted import hybrid_plan

_HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": "float16"}


def planned(*layers: LayerSpec, context_ranks: int = 1, **engine: Any) -> CachePlan:
    """Return the plan of some layers for requests of 512 tokens, with 64 tokens a step."""
    fields = {"longest_request_tokens": engine.pop("longest_request_tokens", 512)}
    fields["null_blocks"] = engine.pop("null_blocks", 1)
    inputs = PlanInputs(
        layers=layers,
        tokens_per_block=16,
        device_blocks=1024,
        engine=EngineInputs(**({"tokens_per_step": 64} | engine)),
        parallel=ParallelInputs(context_ranks=context_ranks, tensor_ranks=context_ranks),
        **fields,
    )
    return plan(inputs)


def shape(*layers: LayerSpec, **changes: Any) -> CacheShape:
    """Return the shape of a cache of some layers."""
    return shapes.shape_of(planned(*layers, **changes), Settings())


def group(*layers: LayerSpec, **changes: Any) -> GroupShape:
    """Return the shape of the last group of some layers."""
    return shape(*layers, **changes).groups[-1]


def test_one_group_of_full_attention_is_simple() -> None:
    """The common case takes the fast path: one group, one key a block, and prefixes that end with blocks."""
    found = shape(full("0"), full("1"))

    assert found.is_simple
    assert found.shares_prefixes
    assert (found.table_width, found.hash_tokens, found.hit_tokens) == (32, 16, 16)


def test_numbers_of_a_shape_are_those_of_plan_and_settings() -> None:
    """A core admits what was planned, within the limits of the settings; no number is derived twice."""
    made = hybrid_plan()
    settings = Settings(max_leases=7, max_waiting=6, max_pins=5, ageing_seconds=2, wait_ms_max=3)

    found = shapes.shape_of(made, settings)

    assert (found.num_blocks, found.num_slots, found.null_blocks) == (64, made.num_slots, 1)
    assert found.longest_request_tokens == made.longest_request_tokens
    assert (found.max_leases, found.max_waiting, found.max_pins) == (7, 6, 5)
    assert (found.ageing_seconds, found.wait_ms_max) == (2, 3)
    assert found.layout_digest == int(made.layout_fingerprint, 16) >> 192


def test_table_of_a_shape_is_as_wide_as_planned() -> None:
    """Workers read tables by the plan, so each group's part has the planned entries."""
    made = hybrid_plan()
    found = shapes.shape_of(made, Settings())

    assert [one.table_blocks for one in found.groups] == [one.table_blocks for one in made.groups]
    assert [(one.kernel_blocks_per_block, one.kernel_block_stride) for one in found.groups] == [
        (one.kernel_blocks_per_block, one.kernel_block_stride) for one in made.groups
    ]
    assert sum(one.max_blocks for one in found.groups) == made.blocks_per_longest_request


def test_window_keeps_what_precedes_the_next_token() -> None:
    """A window keeps all of its tokens but the next one, and those that drafts may take back."""
    plain, retaining = group(full(), window()), group(full(), window(), lookahead_tokens=6)

    assert (plain.keeps, plain.kept_tokens, plain.gives_back) == (Keeps.WINDOW, 127, True)
    assert retaining.kept_tokens == 127 + 5
    assert plain.max_blocks == 12 + 1


def test_windows_of_one_group_keep_what_the_widest_retains() -> None:
    """Windows that retain different numbers of tokens share a table, and the largest number counts."""
    layers = (window("0"), window("1", retained_tokens=9, num_kv_heads=4))

    (found,) = shape(*layers).groups

    assert found.kept_tokens == 127 + 9


def test_short_request_has_no_more_blocks_than_places() -> None:
    """If a request never fills a window, its blocks are as many as the places of its row."""
    found = group(full(), window(), longest_request_tokens=64)

    assert (found.table_blocks, found.max_blocks) == (4, 4)


def test_latent_window_that_is_replayed_is_not_shared() -> None:
    """A window that is computed anew after a hit has no keys, and does not keep other groups from being shared."""
    found = shape(latent(), latent_window(is_replayed=True))

    assert [one.keys_per_block for one in found.groups] == [1, 0]
    assert found.groups[1].keeps is Keeps.WINDOW
    assert found.shares_prefixes


def test_chunk_keeps_its_own_tokens() -> None:
    """Chunked attention keeps the chunk of the next token."""
    found = group(full(), chunk())

    assert (found.keeps, found.kept_tokens, found.gives_back) == (Keeps.CHUNK, 64, True)


@pytest.mark.parametrize("num_speculative", [0, 2])
def test_current_state_is_fixed_and_never_shared(num_speculative: int) -> None:
    """If only the current state is kept, no prefix can be found, whatever the other groups keep."""
    state = states(num_speculative_blocks=num_speculative)

    found = shape(full(), state, state_mode="none", prefix_caching=False)

    assert [one.keeps for one in found.groups] == [Keeps.EVERYTHING, Keeps.FIXED]
    assert found.groups[1].max_blocks == found.groups[1].table_blocks == 1 + num_speculative
    assert not found.shares_prefixes


@pytest.mark.parametrize("longest_request_tokens", [512, 16], ids=["long", "one block"])
def test_aligned_states_leave_places_empty(longest_request_tokens: int) -> None:
    """Aligned states are the newest, the next and then speculative ones, and rows have places for all."""
    state = states(num_speculative_blocks=2)

    found = group(full(), state, state_mode="align", longest_request_tokens=longest_request_tokens)

    assert (found.keeps, found.extra_blocks, found.keys_per_block) == (Keeps.STATE, 2, 1)
    assert found.max_blocks == min(4, found.table_blocks)


def test_all_states_are_kept_like_tokens() -> None:
    """If every block's state is kept, a group of states is found block by block."""
    found = group(full(), states(num_speculative_blocks=1), state_mode="all")

    assert (found.keeps, found.extra_blocks, found.table_blocks) == (Keeps.EVERYTHING, 1, 33)


@pytest.mark.parametrize("state_mode", ["align", "all"])
def test_states_that_cannot_be_told_apart_are_not_shared(state_mode: str) -> None:
    """In a request of two blocks, aligned states look like all states; neither may be found as the other."""
    found = shape(full(), states(), state_mode=state_mode, longest_request_tokens=32)

    assert found.groups[1].keeps is Keeps.FIXED
    assert not found.shares_prefixes


def test_cross_attention_and_rings_are_fixed() -> None:
    """An encoder's output and a ring are granted once; the output keeps prefixes from being shared, a ring does not."""
    layers = (
        full(),
        CrossAttention(name="cross", **_HEADS),
        RingState(name="ring", **_HEADS),
    )

    found = shape(*layers, encoder_tokens_max=40)

    assert [one.keeps for one in found.groups] == [Keeps.EVERYTHING, Keeps.FIXED, Keeps.FIXED]
    assert [one.max_blocks for one in found.groups] == [32, 3, 1]
    assert [one.keys_per_block for one in found.groups] == [1, 0, 0]
    assert not found.shares_prefixes
    assert shape(layers[0], layers[-1], encoder_tokens_max=40).shares_prefixes


def test_nothing_is_shared_where_nothing_has_keys() -> None:
    """Without any group that has keys, a prefix would be found at any length, so none is shared."""
    found = shape(CrossAttention(name="cross", **_HEADS), encoder_tokens_max=40)

    assert not found.shares_prefixes


def test_keys_are_counted_in_hash_tokens() -> None:
    """A block has one key for each of its `hash_tokens`, so that one chain serves blocks of all sizes."""
    found = shapes.shape_of(hybrid_plan(), Settings())

    assert found.hash_tokens == 16
    assert [(one.tokens_per_block, one.keys_per_block) for one in found.groups] == [
        (32, 2),
        (16, 1),
    ]


def test_blocks_without_keys_of_their_own_are_not_shared() -> None:
    """If a key stands for more tokens than a block, the block's end has no key and no prefix can be found."""
    layers = (full(tokens_per_block=32, num_kv_heads=1), window())

    found = shape(*layers, prefix_caching=False)

    assert (found.hash_tokens, found.shares_prefixes) == (32, False)
    assert [one.keys_per_block for one in found.groups] == [1, 0]


def test_context_ranks_share_the_tokens_of_a_block() -> None:
    """A block that context ranks share covers the tokens of all of them."""
    found = group(full(), context_ranks=2)

    assert (found.tokens_per_block, found.keys_per_block, found.table_blocks) == (32, 1, 16)


def test_prefixes_end_where_all_groups_end_a_block() -> None:
    """Prefixes end at whole blocks, even if the plan would let one end inside a block."""
    layers = (full(tokens_per_block=16), states(tokens_per_block=64, bytes_per_page_padded=8192))
    made = planned(*layers, state_mode="align")
    assert made.hit_alignment_tokens < made.scheduler_block_tokens

    assert shapes.shape_of(made, Settings()).hit_tokens == made.scheduler_block_tokens


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param((full(), window()), id="window"),
        pytest.param((full(), chunk()), id="chunk"),
        pytest.param((window(),), id="window alone"),
    ],
)
def test_groups_that_give_back_need_a_null_block(layers: tuple[LayerSpec, ...]) -> None:
    """Empty places read as block 0, which must be a null block; the refusal says which setting would work."""
    with pytest.raises(InvalidError, match="null_blocks=1") as caught:
        plans.require_servable(planned(*layers, null_blocks=0))

    assert (caught.value.rule, caught.value.resource) == ("null_block_needed", "null_blocks")
    assert caught.value.remedies == ("null_blocks=1",)
    plans.require_servable(planned(*layers))


def test_groups_that_keep_all_need_no_null_block() -> None:
    """A table without empty places needs no null block."""
    plans.require_servable(planned(full(), null_blocks=0))
