"""Laws of tensor views: they lie in the region, disjoint, where the plan says."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.plan import CachePlan, PlanInputs
from kvlease.spec import BYTES_PER_ELEMENT, FullAttention
from kvlease.views import layer_views
from kvleased.planning import plan

SHAPES = st.tuples(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 5),
    st.sampled_from(sorted(BYTES_PER_ELEMENT)),
)


def planned(
    *shapes: tuple[int, int, int, str], num_blocks: int = 3, tokens_per_block: int = 4
) -> CachePlan:
    """Return the plan of layers given as (heads, head_size, head_size_v, dtype)."""
    layers = tuple(
        FullAttention(name=str(index), num_kv_heads=heads, head_size=k, head_size_v=v, dtype=dtype)
        for index, (heads, k, v, dtype) in enumerate(shapes)
    )
    return plan(
        PlanInputs(layers=layers, tokens_per_block=tokens_per_block, device_blocks=num_blocks)
    )


@settings(deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 5))
def test_views_are_disjoint_and_in_bounds(
    shapes: list[tuple[int, int, int, str]], num_blocks: int, tokens_per_block: int
) -> None:
    """Every byte of the region belongs to at most one element of one view, and no view leaves the region."""
    layout = planned(*shapes, num_blocks=num_blocks, tokens_per_block=tokens_per_block)
    region = np.zeros(layout.device_bytes, np.uint8)
    for views in layer_views(layout, region):
        for view in views:
            view.view(torch.uint8).add_(1)

    assert region.max() == 1
    assert int(region.sum()) == layout.bytes_per_token * layout.tokens_per_block * layout.num_blocks


def test_views_have_the_plans_shapes_and_types() -> None:
    """K and V of a layer have its heads, its head sizes and its dtype, whatever the other layers have."""
    layout = planned((2, 8, 0, "bfloat16"), (3, 4, 6, "float32"))
    (k0, v0), (k1, v1) = layer_views(layout, memoryview(bytearray(layout.device_bytes)))

    assert k0.shape == v0.shape == (3, 2, 4, 8)
    assert (k1.shape, v1.shape) == ((3, 3, 4, 4), (3, 3, 4, 6))
    assert {k0.dtype, v0.dtype, k1.dtype, v1.dtype} == {torch.bfloat16, torch.float32}


def test_element_lies_where_the_formula_says() -> None:
    """K of block b, head h, token t, element e is at b*bytes_per_block + offset + ((h*T + t)*D + e) * bytes."""
    layout = planned((2, 8, 0, "float32"), (2, 8, 0, "float32"))
    region = np.zeros(layout.device_bytes, np.uint8)
    k, v = layer_views(layout, region)[1]
    k[2, 1, 3, 5] = 1.5
    v[2, 1, 3, 5] = 2.5

    element_bytes = ((1 * 4 + 3) * 8 + 5) * 4
    start = 2 * layout.bytes_per_block + layout.layers[1].offset_bytes + element_bytes
    assert region[start : start + 4].view(np.float32) == [1.5]
    start += 2 * 4 * 8 * 4
    assert region[start : start + 4].view(np.float32) == [2.5]


def test_larger_region_is_viewed_from_its_start() -> None:
    """Memory comes in whole pages: what lies behind the pool is left alone."""
    layout = planned((1, 4, 0, "float32"))
    region = np.zeros(layout.device_bytes + 4096, np.uint8)
    for k, v in layer_views(layout, region):
        k.fill_(1.0)
        v.fill_(1.0)

    assert not region[layout.device_bytes :].any()


def test_shorter_region_is_refused() -> None:
    """A view that would end outside the region is never made."""
    layout = planned((1, 4, 0, "float32"))

    with pytest.raises(InvalidError) as refusal:
        layer_views(layout, np.zeros(layout.device_bytes - 1, np.uint8))

    assert (refusal.value.need, refusal.value.available) == (
        layout.device_bytes,
        layout.device_bytes - 1,
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"offset_bytes": 64}, id="runs into the next block"),
        pytest.param({"bytes_per_page": 64}, id="page shorter than its content"),
    ],
)
def test_plan_whose_pages_do_not_fit_is_refused(changes: dict[str, int]) -> None:
    """A plan from elsewhere is proven before a view is made of it."""
    layout = planned((2, 8, 0, "float32"))
    broken = dataclasses.replace(layout, layers=(dataclasses.replace(layout.layers[0], **changes),))

    with pytest.raises(InvalidError, match="layer '0' needs"):
        layer_views(broken, np.zeros(layout.device_bytes, np.uint8))


def test_plan_with_fewer_bytes_than_blocks_is_refused() -> None:
    """The pool's bytes must hold all of its blocks."""
    layout = planned((2, 8, 0, "float32"))
    broken = dataclasses.replace(layout, device_bytes=layout.device_bytes - 64)

    with pytest.raises(InvalidError, match="in all"):
        layer_views(broken, np.zeros(layout.device_bytes, np.uint8))


def test_read_only_region_is_refused() -> None:
    """Views are for writing; memory that cannot be written is refused before a fault."""
    layout = planned((1, 4, 0, "float32"))

    with pytest.raises(InvalidError, match="read-only"):
        layer_views(layout, memoryview(bytes(layout.device_bytes)))


def test_region_off_an_elements_boundary_is_refused() -> None:
    """Elements lie on their own boundaries, or kernels would fault."""
    layout = planned((1, 4, 0, "float32"))
    region = np.zeros(layout.device_bytes + 8, np.uint8)[1:]

    with pytest.raises(InvalidError, match="address"):
        layer_views(layout, region)
