"""Own how a region and a plan become tensors: strided views, without a copy; no other module here imports torch."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvlease._checks import check_type, checked_integer
from kvlease.errors import InvalidError
from kvlease.geometry import exact_div, floor_div
from kvlease.memory.cuda import DeviceMemory
from kvlease.plan import CachePlan, GroupPlan, LayerPlacement, RankPlan
from kvlease.spec import AttentionSpec, StateSpace
from kvlease.strides import LayerView, packed_view_of, state_views, view_of

_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTensors:
    """The pages of one layer in all blocks of its pool; writing to a tensor writes to the region."""

    name: str
    states: torch.Tensor
    """[blocks, head slots, states, elements of a state]; a recurrent layer's state is one state of bytes."""
    keys: torch.Tensor | None
    """K, [blocks, heads, states, head_size], or a whole latent state; None if states are packed in another way."""
    values: torch.Tensor | None
    """V, [blocks, heads, states, head_size_v]; None if the layer has no V, as latent ones, or if `keys` is None."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors of a recurrent layer's state, each [blocks, *shape]; empty for other layers."""


def layer_views(
    plan: CachePlan,
    device_region: memoryview | NDArray[np.uint8] | DeviceMemory | None,
    rank: int = 0,
    *,
    kernel: bool = False,
) -> list[LayerTensors]:
    """Return the pages of every layer that a rank keeps, in the plan's order, as views of its region.

    Block b of a tensor is block b of the pool; with `kernel`, it is kernel block b, as counted by
    `kvlease.tables.kernel_block_ids`. The views keep the region's buffer alive. A region on a GPU gives tensors on that
    GPU.

    Raises:
        InvalidError: there is no region, as in a worker without memory; the region is read-only, is smaller than the
            plan's, starts off an element's boundary or is on a GPU that torch cannot use; or the plan breaks a rule of
            `kvlease.strides.view_of`.
    """
    check_type("plan", plan, CachePlan)
    rank = checked_integer("rank", rank)
    if not 0 <= rank < len(plan.ranks):
        message = f"there is no rank {rank}; the plan's number of ranks is {len(plan.ranks)}"
        raise InvalidError(
            message, resource="rank", rule="unknown_rank", need=rank, limit=len(plan.ranks)
        )
    ranked = plan.ranks[rank]
    region = device_region if isinstance(device_region, DeviceMemory) else _writable(device_region)
    _require_bytes(len(region), ranked.device_bytes)
    if not ranked.layers:
        return []
    views = [
        _view(plan.num_blocks, ranked, layer, plan.groups[layer.group] if kernel else None)
        for layer in ranked.layers
    ]
    parts = [
        state_views(layer, num_blocks=plan.num_blocks, region_bytes=ranked.device_bytes)
        if isinstance(layer.spec, StateSpace)
        else ()
        for layer in ranked.layers
    ]
    # The first tensor is made only here, after every view has been checked.
    pool = _pool_of(region)[: ranked.device_bytes]
    return [
        _tensors(layer, _tensor(view, pool), tuple(_tensor(part, pool) for part in inner))
        for layer, view, inner in zip(ranked.layers, views, parts, strict=True)
    ]


def _writable(device_region: memoryview | NDArray[np.uint8] | None) -> memoryview:
    """Return the region as writable bytes.

    Raises:
        InvalidError: there is no region, or it is read-only.
    """
    if device_region is None:
        message = (
            "there is no device region: REST and gRPC do not hand over memory; use the address of the local socket, "
            "unix:///…/kvlease.sock, or, for a pool on a GPU, worker.gpu"
        )
        raise InvalidError(message, resource="device_region", rule="no_memory")
    buffer = device_region.data if isinstance(device_region, np.ndarray) else device_region
    try:
        region = memoryview(buffer).cast("B")
    except TypeError as error:
        message = f"the region must be contiguous memory, such as worker.device: {error}"
        raise InvalidError(message, resource="device_region", rule="wrong_type") from error
    if region.readonly:
        message = "the region is read-only; views of it could not be written"
        raise InvalidError(message, resource="device_region")
    return region


def _require_bytes(available: int, need_bytes: int) -> None:
    """Refuse a region that is too short.

    Raises:
        InvalidError: the region is shorter than `need_bytes`.
    """
    if available < need_bytes:
        message = (
            f"the region holds {available} bytes, but the plan's device pool needs {need_bytes}"
        )
        raise InvalidError(
            message,
            resource="device_bytes",
            rule="storage_out_of_bounds",
            need=need_bytes,
            available=available,
        )


def _pool_of(region: memoryview | DeviceMemory) -> torch.Tensor:
    """Return the region as a tensor of bytes, which keeps the region alive.

    Raises:
        InvalidError: the region is on a GPU that this torch cannot use.
    """
    if not isinstance(region, DeviceMemory):
        return torch.frombuffer(region, dtype=torch.uint8)
    try:
        return torch.as_tensor(region, device=f"cuda:{region.device.ordinal}")
    except (AssertionError, RuntimeError) as error:
        # A torch that was built without CUDA raises an AssertionError.
        message = (
            f"torch cannot use {region.device}: {error}; install a torch that was built with CUDA"
        )
        raise InvalidError(message, resource="device", rule="no_torch_cuda") from error


def _view(
    num_blocks: int, rank: RankPlan, layer: LayerPlacement, group: GroupPlan | None
) -> LayerView:
    """Return the view of a layer, in the kernel blocks of its group if one is given."""
    region_bytes = rank.device_bytes
    if group is None or isinstance(layer.spec, StateSpace):
        return view_of(layer, num_blocks=num_blocks, region_bytes=region_bytes)
    kernel_tokens = group.kernel_tokens_per_block
    if layer.block_stride_bytes == layer.spec.content_bytes_per_page:
        return view_of(
            layer, num_blocks=num_blocks, region_bytes=region_bytes, kernel_tokens=kernel_tokens
        )
    packed = packed_view_of(
        layer, num_blocks=num_blocks, region_bytes=region_bytes, kernel_tokens=kernel_tokens
    )
    if packed.kernel_block_stride != group.kernel_block_stride:
        message = (
            f"blocks of layer {layer.name!r} are {packed.kernel_block_stride} kernel blocks apart, but its group's "
            f"table counts {group.kernel_block_stride}; views in kernel blocks need layers with equal pages"
        )
        raise InvalidError(
            message,
            resource="kernel_block_stride",
            rule="kernel_block_stride_differs",
            need=packed.kernel_block_stride,
            available=group.kernel_block_stride,
        )
    return packed.view


def _tensor(view: LayerView, pool: torch.Tensor) -> torch.Tensor:
    exact_div(pool.data_ptr(), view.bytes_per_element, what="the region's address")
    whole_bytes = floor_div(len(pool), view.bytes_per_element) * view.bytes_per_element
    elements = pool[:whole_bytes].view(_DTYPES[view.dtype])
    return elements.as_strided(view.shape, view.strides, view.storage_offset)


def _tensors(
    layer: LayerPlacement, states: torch.Tensor, inner: tuple[torch.Tensor, ...]
) -> LayerTensors:
    keys = values = None
    spec = layer.spec
    if isinstance(spec, AttentionSpec) and _is_plain(spec):
        keys = states[..., : spec.head_size]
        values = states[..., spec.head_size :] if spec.value_head_size else None
    return LayerTensors(name=layer.name, states=states, keys=keys, values=values, tensors=inner)


def _is_plain(spec: AttentionSpec) -> bool:
    """Tell whether a state holds the elements of K and then those of V, and nothing else."""
    plain_bytes = (spec.head_size + spec.value_head_size) * spec.bytes_per_element
    return spec.bytes_per_state == plain_bytes and spec.head_slots == spec.num_kv_heads
