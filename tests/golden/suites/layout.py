"""Answer the vectors of layouts: strides, views, and kernel blocks of compressed pages."""

from collections.abc import Mapping
from typing import Any

from kvlease.errors import KVLeaseError
from kvlease.geometry import floor_div
from kvlease.layout import parse_layout
from kvlease.plan import LayerPlacement
from kvlease.strides import LayerView, PageStrides, packed_view_of, page_strides, view_of
from kvlease.tables import kernel_block_ids
from kvleased.planning.pool import bytes_per_block, check_layout, place
from tests.golden.words import error_words, groups_of, spec_of

_AXES = "LBHNC"


def layout_strides(given: dict[str, Any]) -> dict[str, Any]:
    """Return the extents and strides of a run of equal layers."""
    strides = page_strides(
        spec_of(given["spec"]),
        num_layers=given["num_layers"],
        num_blocks=given["num_blocks"],
        layout=parse_layout(given["kv_cache_layout"]),
        kernel_tokens=given["kernel_block_size"],
        fixed=_fixed(given["fixed_strides"]),
    )
    return {
        "shape_bytes_LBHNC": list(strides.extents),
        "strides_bytes_LBHNC": list(strides.strides_bytes),
    }


def allocate_views(given: dict[str, Any]) -> dict[str, Any]:
    """Return every layer's place and view."""
    layout = parse_layout(given["kv_cache_layout"])
    groups = groups_of(given["groups"], given["specs"])
    check_layout(groups, layout)
    num_blocks = given["num_blocks"]
    block = bytes_per_block(groups, layout, 1)
    layers, tensors, _ = place(groups, layout=layout, num_blocks=num_blocks, block_multiple_bytes=1)
    region_bytes = num_blocks * block
    views = {
        layer.name: view_of(
            layer,
            num_blocks=num_blocks,
            region_bytes=region_bytes,
            kernel_tokens=given["kernel_block_sizes"][layer.group],
        )
        for layer in layers
    }
    return {
        "bytes_per_block": block,
        "allocation_bytes": region_bytes,
        "tensors": [
            {
                "size": region_bytes,
                "offset": tensor.offset_bytes,
                "layer_stride": tensor.layer_stride_bytes,
                "block_stride": tensor.block_stride_bytes,
                "layers": list(tensor.layer_names),
            }
            for tensor in tensors
        ],
        "views": {name: _view_words(view, region_bytes) for name, view in views.items()},
    }


def compressed_reshape(given: dict[str, Any]) -> dict[str, Any]:
    """Return what views of a compressed cache need, with blocks counted in tokens (wrong) and in states (right)."""
    spec = spec_of(given["spec"])
    num_blocks, kernel_states = given["num_blocks"], given["kernel_storage_block_size"]
    region_bytes = num_blocks * spec.bytes_per_page
    strides = page_strides(spec, num_layers=1, num_blocks=num_blocks, layout=parse_layout("LBNHC"))
    layer = _alone(spec_of(given["spec"]), strides)

    def view(blocks: int) -> dict[str, Any]:
        words: dict[str, Any] = {"kernel_num_blocks": blocks}
        unbounded = view_of(layer, num_blocks=blocks, region_bytes=blocks * spec.bytes_per_page)
        words["required_bytes"] = unbounded.end_bytes
        try:
            view_of(layer, num_blocks=blocks, region_bytes=region_bytes)
        except KVLeaseError as refusal:
            return {**words, "fits": False, "error_class": error_words(refusal)["class"]}
        return {**words, "fits": True}

    right = view_of(layer, num_blocks=num_blocks, region_bytes=region_bytes)
    in_tokens = num_blocks * floor_div(spec.block_tokens, kernel_states)
    in_states = num_blocks * floor_div(spec.states_per_block, kernel_states)
    return {
        "page_size_bytes": spec.bytes_per_page,
        "storage_bytes": region_bytes,
        "storage_block_size": spec.states_per_block,
        "naive": view(in_tokens),
        "correct": view(in_states),
        "vllm_view": _view_words(right, region_bytes),
    }


def map_packed_cache(given: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's view in kernel blocks, where pages of other layers may lie between its own."""
    layout = parse_layout(given["kv_cache_layout"])
    groups = groups_of(given["groups"], given["specs"])
    num_blocks, kernel_tokens = given["num_blocks"], given["kernel_block_size"]
    layers, _, _ = place(groups, layout=layout, num_blocks=num_blocks, block_multiple_bytes=1)
    region_bytes = num_blocks * bytes_per_block(groups, layout, 1)
    layer = next(layer for layer in layers if layer.name == given["layer"])
    whole = view_of(layer, num_blocks=num_blocks, region_bytes=region_bytes)
    packed = packed_view_of(
        layer, num_blocks=num_blocks, region_bytes=region_bytes, kernel_tokens=kernel_tokens
    )
    ids = kernel_block_ids(
        [0, num_blocks - 1],
        packed.kernel_blocks_per_block,
        kernel_block_stride=packed.kernel_block_stride,
    )
    stride_bytes = packed.view.strides[0] * packed.view.bytes_per_element
    offset_bytes = packed.view.storage_offset * packed.view.bytes_per_element
    is_dense = packed.kernel_block_stride == packed.kernel_blocks_per_block
    return {
        "manager_view": _view_words(whole, region_bytes),
        "kernel_view": _view_words(packed.view, region_bytes),
        # The reference says 0 for blocks with nothing between them; we say how far apart they are.
        "kernel_block_stride": 0 if is_dense else packed.kernel_block_stride,
        "kernel_block_ids_of_blocks_0_and_last": [int(block) for block in ids],
        "kernel_block_byte_offsets": [offset_bytes + int(block) * stride_bytes for block in ids],
    }


def _fixed(strides: list[int | None]) -> Mapping[str, int]:
    return {axis: stride for axis, stride in zip(_AXES, strides, strict=True) if stride is not None}


def _alone(spec: Any, strides: PageStrides) -> LayerPlacement:
    """Return the place of a layer that has a region to itself."""
    return LayerPlacement(
        name=spec.name,
        group=0,
        offset_bytes=0,
        block_stride_bytes=strides.block_stride_bytes,
        bytes_per_page=spec.bytes_per_page,
        head_stride_bytes=strides.head_stride_bytes,
        state_stride_bytes=strides.state_stride_bytes,
        spec=spec,
    )


def _view_words(view: LayerView, region_bytes: int) -> dict[str, Any]:
    return {
        "dtype": view.dtype,
        "shape": list(view.shape),
        "stride": list(view.strides),
        "storage_offset": view.storage_offset,
        "element_size": view.bytes_per_element,
        "end_byte": view.end_bytes,
        "storage_bytes": region_bytes,
    }
