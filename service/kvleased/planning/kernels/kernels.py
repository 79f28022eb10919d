"""Own what a plan must know of the kernels that read its pages: how they count blocks, and that pages have views."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlease.errors import InvalidError
from kvlease.geometry import exact_div
from kvlease.plan import BackendInputs, LayerPlacement, RankPlan, TensorPlan
from kvlease.spec import AttentionSpec, LayerSpec, StateSpace
from kvlease.strides import check_disjoint, packed_view_of, state_views, view_of
from kvleased.planning.kernels.kernel_blocks import backends_of, common_kernel_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBlocks:
    """How the kernels of a group count its blocks."""

    tokens_per_block: int
    blocks_per_block: int
    """Kernel blocks in one block."""
    block_stride: int
    """Kernel blocks from one block to the next."""


def kernel_blocks(
    group: int,
    layers: Sequence[LayerSpec],
    *,
    ranks: Iterable[RankPlan],
    num_blocks: int,
    backends: Sequence[BackendInputs],
) -> KernelBlocks:
    """Return how the kernels of a group's layers count: in whole blocks if all backends read them, else in parts.

    Raises:
        InvalidError: a backend is unknown, no part is read by all backends (rule no_common_kernel_block_size), or the
            pages cannot be counted in parts as they lie (rule packed_cache_not_splittable).
    """
    block_tokens = layers[0].block_tokens
    tokens = block_tokens
    if not isinstance(layers[0], StateSpace):
        tokens = common_kernel_tokens(block_tokens, backends_of(layers, backends), layers)
    whole = KernelBlocks(tokens_per_block=block_tokens, blocks_per_block=1, block_stride=1)
    if tokens == block_tokens:
        return whole
    found = {
        _parts(layer, tokens, num_blocks=num_blocks, region_bytes=rank.device_bytes)
        for rank in ranks
        for layer in rank.layers
        if layer.group == group
    }
    if len(found) > 1:
        message = (
            f"kernels of {layers[0].name!r} and the layers that share its table would count their blocks of "
            f"{block_tokens} tokens differently, in parts of {tokens}; set tokens_per_block to {tokens}"
        )
        raise InvalidError(
            message, resource="tokens_per_block", rule="packed_cache_not_splittable", need=tokens
        )
    return found.pop()


def check_views(rank: RankPlan, num_blocks: int) -> None:
    """Refuse places that an engine cannot make tensors of; the ends of a run of equal layers stand for the whole run.

    Raises:
        InvalidError: a page does not start at a boundary of its elements, ends outside of the region, or overlaps
            another.
    """
    places = {layer.name: layer for layer in rank.layers}
    for tensor in rank.tensors:
        for layer in _ends(tensor, places):
            check_disjoint(layer, num_blocks)
            view_of(layer, num_blocks=num_blocks, region_bytes=rank.device_bytes)
            if isinstance(layer.spec, StateSpace):
                state_views(layer, num_blocks=num_blocks, region_bytes=rank.device_bytes)


def _ends(tensor: TensorPlan, places: dict[str, LayerPlacement]) -> tuple[LayerPlacement, ...]:
    names = dict.fromkeys((tensor.layer_names[0], tensor.layer_names[-1]))
    return tuple(places[name] for name in names)


def _parts(
    layer: LayerPlacement, tokens: int, *, num_blocks: int, region_bytes: int
) -> KernelBlocks:
    """Return how a kernel counts the blocks of one layer in parts of so many tokens."""
    spec = layer.spec
    if layer.block_stride_bytes == spec.content_bytes_per_page:
        parts = exact_div(spec.block_tokens, tokens)
        return KernelBlocks(tokens_per_block=tokens, blocks_per_block=parts, block_stride=parts)
    if not isinstance(spec, AttentionSpec) or spec.tokens_per_state == 1 or spec.head_slots > 1:
        message = (
            f"kernels of layer {spec.name!r} read blocks of {tokens} tokens, but other bytes lie between its blocks of "
            f"{spec.block_tokens} tokens; set tokens_per_block to {tokens}, or choose a layout with layers outermost"
        )
        raise InvalidError(
            message,
            resource="tokens_per_block",
            rule="packed_cache_not_splittable",
            need=tokens,
            available=spec.block_tokens,
        )
    packed = packed_view_of(
        layer, num_blocks=num_blocks, region_bytes=region_bytes, kernel_tokens=tokens
    )
    return KernelBlocks(
        tokens_per_block=tokens,
        blocks_per_block=packed.kernel_blocks_per_block,
        block_stride=packed.kernel_block_stride,
    )
