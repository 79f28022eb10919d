"""Laws of tensor views: they lie in the region where the plan says, and do not overlap."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.layout import Layout
from kvlease.memory.cuda import Device, DeviceMemory
from kvlease.plan import CachePlan
from kvlease.spec import BYTES_PER_ELEMENT, MLA, FullAttention, StateSpace
from kvlease.tables import kernel_block_ids
from kvlease.views import layer_views
from tests.unit.client.placing import plan_of

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 5))


def layer(name: str = "0", tokens: int = 4, heads: int = 2, **fields: Any) -> FullAttention:
    """Return a layer of float32 with heads of 8 elements unless the arguments say otherwise."""
    given = {"head_size": 8, "dtype": "float32", **fields}
    return FullAttention(name=name, tokens_per_block=tokens, num_kv_heads=heads, **given)


def latent(name: str, tokens: int = 256, **fields: Any) -> MLA:
    """Return a latent layer that is compressed by four."""
    given = {"head_size": 16, "dtype": "bfloat16", "tokens_per_state": 4, **fields}
    return MLA(name=name, tokens_per_block=tokens, **given)


def region_of(plan: CachePlan) -> np.ndarray:
    """Return memory of exactly the plan's size."""
    return np.zeros(plan.device_bytes, np.uint8)


def changed(plan: CachePlan, **changes: int) -> CachePlan:
    """Return the plan with another place for its first layer."""
    first = dataclasses.replace(plan.layers[0], **changes)
    rank = dataclasses.replace(plan.ranks[0], layers=(first, *plan.layers[1:]))
    return dataclasses.replace(plan, ranks=(rank,))


@settings(deadline=None)
@given(
    st.lists(SHAPES, min_size=1, max_size=4),
    st.sampled_from(sorted(BYTES_PER_ELEMENT)),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([Layout.BLHNC, Layout.LBNHC]),
)
def test_views_are_disjoint_and_in_bounds(
    shapes: list[tuple[int, int, int]], dtype: str, num_blocks: int, tokens: int, layout: Layout
) -> None:
    """Every byte of the region belongs to exactly one element of one layer's K or V."""
    specs = [
        layer(str(index), tokens, heads, head_size=k, head_size_v=v, dtype=dtype)
        for index, (heads, k, v) in enumerate(shapes)
    ]
    plan = plan_of(*specs, layout=layout, num_blocks=num_blocks)
    region = region_of(plan)
    for view in layer_views(plan, region):
        for part in (view.keys, view.values):
            if part is not None:
                part.copy_(torch.ones(()))
    elements = region.view(np.dtype(f"u{BYTES_PER_ELEMENT[dtype]}"))

    assert elements.all()


def test_views_have_the_plans_shapes_and_types() -> None:
    """A layer's K and V have its heads, head sizes and dtype, and are slices of its states."""
    plan = plan_of(layer("0", dtype="bfloat16"), layer("1", heads=3, head_size=4, head_size_v=6))

    one, other = layer_views(plan, memoryview(bytearray(plan.device_bytes)))

    assert one.keys is not None
    assert one.values is not None
    assert one.keys.shape == one.values.shape == (3, 2, 4, 8)
    assert one.states.shape == (3, 2, 4, 16)
    assert other.keys is not None
    assert other.values is not None
    assert (other.name, other.keys.shape[-1], other.values.shape[-1]) == ("1", 4, 6)
    assert (one.states.dtype, other.states.dtype) == (torch.bfloat16, torch.float32)
    assert one.tensors == ()


def test_element_lies_where_the_formula_says() -> None:
    """K of block b, head h, token t is at offset + b*block_stride + h*head_stride + t*state_stride; V follows."""
    plan = plan_of(layer("0"), layer("1"))
    region = region_of(plan)
    view, place = layer_views(plan, region)[1], plan.layers[1]
    assert view.keys is not None
    assert view.values is not None
    view.keys[2, 1, 3, 5] = 1.5
    view.values[2, 1, 3, 5] = 2.5

    state = place.offset_bytes + 2 * place.block_stride_bytes
    state += place.head_stride_bytes + 3 * place.state_stride_bytes
    written = region.view(np.float32)
    assert written[(state + 5 * 4) // 4] == 1.5
    assert written[(state + (8 + 5) * 4) // 4] == 2.5
    assert np.count_nonzero(written) == 2


def test_latent_layer_has_no_values() -> None:
    """A latent state is all key and has nothing else in it."""
    view = layer_views(plan := plan_of(latent("0")), region_of(plan))[0]

    assert view.keys is not None
    assert view.keys.shape == (3, 1, 64, 16)
    assert view.values is None


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"dtype": "uint8", "quantisation": "fp8_per_token_head"}, id="with scales"),
        pytest.param({"dtype": "uint8", "bytes_per_state_packed": 20}, id="packed by a backend"),
        pytest.param({"num_head_slots": 3}, id="more slots than heads"),
    ],
)
def test_states_that_are_packed_otherwise_have_neither_keys_nor_values(
    fields: dict[str, Any],
) -> None:
    """A state that only a backend can take apart is not cut into K and V."""
    view = layer_views(plan := plan_of(layer(**fields)), region_of(plan))[0]

    assert view.keys is view.values is None
    assert view.states.shape[1] == plan.layers[0].spec.head_slots


def test_state_has_its_own_tensors_over_its_page() -> None:
    """A recurrent layer's tensors have their own shapes and types; its bytes are one view over all of them."""
    spec = StateSpace(
        name="0",
        tokens_per_block=16,
        shapes=((2, 4), (3,)),
        dtypes=("bfloat16", "float32"),
        bytes_per_page_padded=64,
    )
    plan = plan_of(spec)
    region = region_of(plan)

    view = layer_views(plan, region, kernel=True)[0]
    view.tensors[0].fill_(1)
    view.tensors[1].fill_(1)

    assert [tensor.shape for tensor in view.tensors] == [(3, 2, 4), (3, 3)]
    assert [tensor.dtype for tensor in view.tensors] == [torch.bfloat16, torch.float32]
    assert view.states.shape == (3, 1, 1, 28)
    assert view.keys is view.values is None
    assert region.reshape(3, 64)[:, :28].any(axis=0).sum() == 8 * 2 + 3 * 2
    assert not region.reshape(3, 64)[:, 28:].any()


def test_kernel_view_is_in_kernel_blocks() -> None:
    """With `kernel`, a block of 128 tokens is two blocks of 64."""
    plan = plan_of(layer(tokens=128), layout=Layout.LBNHC, kernel_tokens=64, kernel_block_stride=2)

    view = layer_views(plan, region_of(plan), kernel=True)[0]

    assert view.states.shape == (6, 2, 64, 16)


def test_packed_kernel_view_is_read_by_expanded_ids() -> None:
    """The content of block b of a packed compressed layer, and nothing else, is found under its kernel ids."""
    plan = plan_of(latent("0"), latent("1"), kernel_tokens=64, kernel_block_stride=8)
    region = region_of(plan)
    whole, kernel = layer_views(plan, region)[1], layer_views(plan, region, kernel=True)[1]
    whole.states[2] = 1.0

    ids = kernel_block_ids([2], 4, 8)

    assert kernel.states.shape == (2 * 8 + 4, 1, 16, 16)
    assert bool((kernel.states[ids.tolist()] == 1.0).all())
    assert int((kernel.states == 1.0).sum()) == 64 * 16


def test_table_that_counts_other_kernel_blocks_is_refused() -> None:
    """Views in kernel blocks are made only if the group's table leads to this layer's pages."""
    plan = plan_of(latent("0"), latent("1", head_size=48), kernel_tokens=64, kernel_block_stride=8)

    with pytest.raises(InvalidError) as refusal:
        layer_views(plan, region_of(plan), kernel=True)

    assert refusal.value.rule == "kernel_block_stride_differs"
    assert (refusal.value.need, refusal.value.available) == (16, 8)


def test_larger_region_is_viewed_from_its_start() -> None:
    """Memory comes in whole pages, and what lies behind the pool is left alone."""
    plan = plan_of(layer())
    region = np.zeros(plan.device_bytes + 4096, np.uint8)
    for view in layer_views(plan, region):
        view.states.fill_(1.0)

    assert not region[plan.device_bytes :].any()


def test_shorter_region_is_refused() -> None:
    """A view that would end outside the region is refused."""
    plan = plan_of(layer())

    with pytest.raises(InvalidError) as refusal:
        layer_views(plan, region_of(plan)[:-1])

    assert refusal.value.need == plan.device_bytes
    assert refusal.value.available == plan.device_bytes - 1


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        pytest.param({"offset_bytes": 64}, "storage_out_of_bounds", id="ends after the pool"),
        pytest.param({"bytes_per_page": 64}, "page_below_content", id="page below its content"),
        pytest.param({"block_stride_bytes": 64}, "blocks_overlap", id="blocks over each other"),
    ],
)
def test_plan_whose_pages_do_not_fit_is_refused(changes: dict[str, int], rule: str) -> None:
    """A plan that comes from elsewhere is checked before a view is made of it."""
    plan = plan_of(layer())

    with pytest.raises(InvalidError, match="layer '0'") as refusal:
        layer_views(changed(plan, **changes), region_of(plan))

    assert refusal.value.rule == rule


def test_rank_without_layers_has_no_views() -> None:
    """A rank that keeps nothing needs no region."""
    plan = plan_of(layer())
    empty = dataclasses.replace(plan.ranks[0], layers=(), device_bytes=0)

    assert layer_views(dataclasses.replace(plan, ranks=(empty,)), np.zeros(0, np.uint8)) == []


@pytest.mark.parametrize("rank", [-1, 1])
def test_unknown_rank_is_refused(rank: int) -> None:
    """The plan must have the rank of the view."""
    plan = plan_of(layer())

    with pytest.raises(InvalidError, match="no rank"):
        layer_views(plan, region_of(plan), rank)


def test_region_that_is_not_there_is_refused() -> None:
    """A worker over REST or gRPC has no memory, and is told which address gives it some."""
    with pytest.raises(InvalidError, match="local socket"):
        layer_views(plan_of(layer()), None)


def test_read_only_region_is_refused() -> None:
    """Views are for writing, so read-only memory is refused before it can fault."""
    plan = plan_of(layer())

    with pytest.raises(InvalidError, match="read-only"):
        layer_views(plan, memoryview(bytes(plan.device_bytes)))


def test_region_off_an_elements_boundary_is_refused() -> None:
    """Elements lie at multiples of their size, or kernels would fault."""
    plan = plan_of(layer())
    region = np.zeros(plan.device_bytes + 8, np.uint8)[1:]

    with pytest.raises(InvalidError, match="address"):
        layer_views(plan, region)


def test_region_on_a_gpu_needs_a_torch_that_can_use_it() -> None:
    """A torch without CUDA is named as the reason; a region that is too short is refused before that."""
    if torch.cuda.is_available():
        pytest.skip("this torch can use a GPU")
    plan = plan_of(layer(), num_blocks=2)
    region = DeviceMemory(Device(0, "some"), 4096, plan.device_bytes, 4096)
    short = DeviceMemory(Device(0, "some"), 4096, plan.device_bytes - 1, 4096)

    with pytest.raises(InvalidError, match="built with CUDA"):
        layer_views(plan, region)
    with pytest.raises(InvalidError, match="the region holds"):
        layer_views(plan, short)
    for one in (region, short):
        one._end.detach()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"plan": None}, "plan must be"),
        ({"rank": None}, "rank must be an integer"),
        ({"rank": "0"}, "rank must be an integer"),
        ({"device_region": 5}, "the region must be contiguous memory"),
        ({"device_region": memoryview(bytearray(64))[::2]}, "the region must be contiguous memory"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(arguments: dict[str, Any], told: str) -> None:
    """What is no plan, no rank or no memory is refused by its name."""
    plan = plan_of(layer())

    with pytest.raises(InvalidError, match=told):
        layer_views(**{"plan": plan, "device_region": region_of(plan)} | arguments)
