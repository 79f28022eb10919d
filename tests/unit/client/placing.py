"""Build places of layers from strides alone, so that the laws of strides and views need no planner."""

from kvlease.layout import Layout
from kvlease.plan import CachePlan, GroupPlan, LayerPlacement, RankPlan
from kvlease.spec import LayerSpec
from kvlease.strides import page_strides


def placed(
    *specs: LayerSpec, layout: Layout = Layout.BLHNC, num_blocks: int = 3
) -> tuple[list[LayerPlacement], int]:
    """Return the places of layers that follow each other, each a run of its own, and the bytes of their region."""
    bytes_per_block = sum(spec.bytes_per_page for spec in specs)
    places, offset_bytes = [], 0
    for spec in specs:
        fixed = {"B": bytes_per_block} if layout.is_block_outermost else {}
        strides = page_strides(
            spec, num_layers=1, num_blocks=num_blocks, layout=layout, fixed=fixed
        )
        places.append(
            LayerPlacement(
                name=spec.name,
                group=0,
                offset_bytes=offset_bytes,
                block_stride_bytes=strides.block_stride_bytes,
                bytes_per_page=spec.bytes_per_page,
                head_stride_bytes=strides.head_stride_bytes,
                state_stride_bytes=strides.state_stride_bytes,
                spec=spec,
            )
        )
        pages = 1 if layout.is_block_outermost else num_blocks
        offset_bytes += pages * spec.bytes_per_page
    return places, num_blocks * bytes_per_block


def plan_of(
    *specs: LayerSpec,
    layout: Layout = Layout.BLHNC,
    num_blocks: int = 3,
    kernel_tokens: int | None = None,
    kernel_block_stride: int = 1,
) -> CachePlan:
    """Return a plan of one group and one rank that has only what views need."""
    layers, region_bytes = placed(*specs, layout=layout, num_blocks=num_blocks)
    tokens = specs[0].block_tokens
    group = GroupPlan(
        spec=specs[0],
        layer_names=tuple(spec.name for spec in specs),
        tokens_per_block=tokens,
        bytes_per_page=specs[0].bytes_per_page,
        has_equal_layers=len(set(specs)) == 1,
        blocks_per_longest_request=1,
        table_blocks=1,
        kernel_tokens_per_block=kernel_tokens or tokens,
        kernel_blocks_per_block=tokens // (kernel_tokens or tokens),
        kernel_block_stride=kernel_block_stride,
        is_prefix_cacheable=True,
        is_context_sharded=False,
        is_drafted=False,
    )
    rank = RankPlan(
        rank=0,
        bytes_per_block=region_bytes // num_blocks,
        device_bytes=region_bytes,
        bytes_per_longest_request=region_bytes // num_blocks,
        layers=tuple(layers),
        tensors=(),
        extents=(),
        slot_cell_offset_bytes=0,
        slot_cell_bytes=region_bytes // num_blocks,
        needs_scrub=False,
    )
    return CachePlan(
        layout_fingerprint="",
        layout=layout,
        model_digest="",
        num_blocks=num_blocks,
        null_blocks=0,
        longest_request_tokens=tokens,
        blocks_per_longest_request=1,
        capacity_tokens=num_blocks * tokens,
        tokens_per_block=tokens,
        hash_block_tokens=tokens,
        scheduler_block_tokens=tokens,
        hit_alignment_tokens=tokens,
        groups=(group,),
        ranks=(rank,),
        tensor_replicas=1,
        num_slots=0,
        blocks_per_slot=1,
        bytes_per_slot=0,
        num_disk_slots=0,
        num_remote_slots=0,
        waste=(),
    )
