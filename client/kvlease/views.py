"""Own the way from a region and a plan to tensors: strided views, no copy; the one module here that imports torch."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.geometry import exact_div, page_end_bytes
from kvlease.plan import CachePlan, LayerPlacement

_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def layer_views(
    plan: CachePlan, device_region: memoryview | NDArray[np.uint8]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return K and V of every layer, in the plan's order, as views of the region.

    K is [num_blocks, num_kv_heads, tokens_per_block, head_size], V the same with head_size_v; block b of a view is
    block b of the pool. The views keep the region's buffer alive.

    Raises:
        InvalidError: the region is read-only, ends before the plan does, or starts off an element's boundary.
    """
    buffer = device_region.data if isinstance(device_region, np.ndarray) else device_region
    region = memoryview(buffer).cast("B")
    if region.readonly:
        message = "the region is read-only; views of it could not be written"
        raise InvalidError(message, resource="device_region")
    if len(region) < plan.device_bytes:
        message = (
            f"the region holds {len(region)} bytes and the plan's device pool {plan.device_bytes}"
        )
        raise InvalidError(
            message, resource="device_bytes", need=plan.device_bytes, available=len(region)
        )
    for layer in plan.layers:
        _check_bounds(plan, layer)
    pool = torch.frombuffer(region, dtype=torch.uint8, count=plan.device_bytes)
    return [_views_of(plan, layer, pool) for layer in plan.layers]


def _check_bounds(plan: CachePlan, layer: LayerPlacement) -> None:
    """Refuse a layer whose pages overlap the next block or end outside the pool, before a view of it is made."""
    spec = layer.spec
    page_bytes = spec.bytes_per_token * plan.tokens_per_block
    need = page_end_bytes(
        num_blocks=plan.num_blocks,
        bytes_per_block=plan.bytes_per_block,
        offset_bytes=layer.offset_bytes,
        page_bytes=page_bytes,
    )
    fits_block = layer.offset_bytes + page_bytes <= plan.bytes_per_block
    if layer.bytes_per_page != page_bytes or not fits_block or need > plan.device_bytes:
        message = (
            f"layer {layer.name!r} needs {page_bytes} bytes at {layer.offset_bytes} of every block and {need} bytes "
            f"in all; the plan gives its page {layer.bytes_per_page}, a block {plan.bytes_per_block} "
            f"and the pool {plan.device_bytes}"
        )
        raise InvalidError(message, resource="device_bytes", need=need, available=plan.device_bytes)


def _views_of(
    plan: CachePlan, layer: LayerPlacement, pool: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    spec = layer.spec
    exact_div(pool.data_ptr(), spec.bytes_per_element, what="the region's address")
    elements = pool.view(_DTYPES[spec.dtype])
    block_stride = exact_div(plan.bytes_per_block, spec.bytes_per_element, what="bytes_per_block")
    offset_k = exact_div(layer.offset_bytes, spec.bytes_per_element, what="offset_bytes")
    offset_v = offset_k + spec.num_kv_heads * plan.tokens_per_block * spec.head_size

    def view(offset: int, head_size: int) -> torch.Tensor:
        return elements.as_strided(
            (plan.num_blocks, spec.num_kv_heads, plan.tokens_per_block, head_size),
            (block_stride, plan.tokens_per_block * head_size, head_size, 1),
            offset,
        )

    return view(offset_k, spec.head_size), view(offset_v, spec.head_size_v or spec.head_size)
