"""Answer the vectors of kernel blocks, and of the block sizes that are chosen for a model."""

from collections.abc import Sequence
from typing import Any

from kvlease.layout import parse_layout
from kvlease.plan import BackendInputs
from kvlease.spec import MLA, AttentionSpec, FullAttention, StateSpace
from kvleased.planning.kernels.block_choice import hybrid_blocks, largest_block_within, mixed_blocks
from kvleased.planning.kernels.kernel_blocks import (
    common_kernel_tokens,
    kernel_tokens_by_group,
    preferred_block,
    supports_block,
    with_backend_stride,
)
from kvleased.planning.pool import place
from tests.golden.words import groups_of, spec_of, spec_words

_DTYPE_OF_CACHE = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def select_common_block_size(given: dict[str, Any]) -> dict[str, Any]:
    """Return the kernel block of one group."""
    backends = [_backend(words) for words in given["backends"]]
    return {"kernel_block_size": common_kernel_tokens(given["kv_manager_block_size"], backends)}


def prepare_kernel_block_sizes(given: dict[str, Any]) -> dict[str, Any]:
    """Return the kernel block of every group."""
    groups = groups_of(given["groups"], given["specs"])
    _, tensors, _ = place(
        groups,
        layout=parse_layout(given["kv_cache_layout"]),
        num_blocks=given["num_blocks"],
        block_multiple_bytes=1,
    )
    backends = [[_backend(words) for words in of_group] for of_group in given["backends"]]
    layers = [group.layers for group in groups]
    return {"kernel_block_sizes": list(kernel_tokens_by_group(layers, backends, tensors))}


def backend_supports(given: dict[str, Any]) -> dict[str, Any]:
    """Return whether one backend supports a block size, and which one it prefers."""
    backend = _backend({"name": "backend", "sizes": given["sizes"]})
    return {
        "supports_block_size": supports_block(backend, given["block_size"]),
        "preferred_block_size": preferred_block([backend], given["block_size"]),
    }


def preferred_block_size(given: dict[str, Any]) -> dict[str, Any]:
    """Return the block size of a model for which nobody chose one."""
    whole = frozenset(words["name"] for words in given["backends"] if words.get("exact"))
    backends = [_backend(words) for words in given["backends"]]
    return {"block_size": preferred_block(backends, given["default_block_size"], whole)}


def largest_kernel_block_within(given: dict[str, Any]) -> dict[str, Any]:
    """Return the largest kernel block whose tokens fit a page."""
    tokens = largest_block_within(
        _backend({"name": "backend", "sizes": given["sizes"]}),
        bytes_per_token=given["per_token_bytes"],
        bytes_per_page=given["page_budget"],
        fallback=given["fallback"],
    )
    return {"block_size": tokens}


def customize_spec(given: dict[str, Any]) -> dict[str, Any]:
    """Return how a backend spaces a layer's blocks."""
    backend = _backend({"name": "backend", "sizes": given["sizes"]})
    spec = with_backend_stride(spec_of(given["spec"]), backend)
    return {
        "block_stride_alignment": spec_words(spec, given["spec"])["block_stride_alignment"],
        "block_stride_alignment_bytes": spec.block_stride_multiple,
    }


def hybrid_block_size(given: dict[str, Any]) -> dict[str, Any]:
    """Return the block sizes of a model with recurrent layers."""
    shapes = tuple(tuple(shape) for shape in given["state_shapes"])
    state = StateSpace(name="state", shapes=shapes, dtypes=tuple(given["state_dtypes"]))
    blocks = hybrid_blocks(
        [_backend(words) for words in given["backends"]],
        tokens_per_block=given["block_size"],
        bytes_per_token=_token_page(given, given["dtype"], is_latent=given["use_mla"]),
        bytes_per_state=state.bytes_per_page,
        is_latent=given["use_mla"],
        are_states_aligned=given["mamba_cache_mode"] == "align",
    )
    chosen = blocks.state_tokens_per_block
    return {
        "block_size": blocks.tokens_per_block,
        "mamba_block_size": given["mamba_block_size"] if chosen is None else chosen,
        "mamba_page_size_padded": blocks.state_bytes_per_page_padded,
    }


def heterogeneous_block_size(given: dict[str, Any]) -> dict[str, Any]:
    """Return the block sizes of a model in which some layers are quantised."""
    dtype = _DTYPE_OF_CACHE.get(given["cache_dtype"], given["cache_dtype"])
    state_page = given["mamba_page_size_padded"]
    blocks = mixed_blocks(
        _backend({"name": "backend", "sizes": given["sizes"]}),
        tokens_per_block=given["block_size"],
        bytes_per_token=_token_page(given, dtype),
        bytes_per_token_unquantised=_token_page(given, given["dtype"]),
        bytes_per_state_page=state_page or 0,
    )
    return {
        "block_size": blocks.tokens_per_block,
        "skip_page_size_padded": blocks.bytes_per_page,
        "mamba_page_size_padded": None if state_page is None else blocks.bytes_per_page,
    }


def _token_page(given: dict[str, Any], dtype: str, *, is_latent: bool = False) -> int:
    """Return the bytes of one token of the vector's attention layer."""
    kind: type[AttentionSpec] = MLA if is_latent else FullAttention
    return kind(
        name="layer",
        tokens_per_block=1,
        num_kv_heads=given["num_kv_heads"],
        head_size=given["head_size"],
        dtype=dtype,
    ).bytes_per_page


def _backend(words: dict[str, Any]) -> BackendInputs:
    sizes: Sequence[Any] = words["sizes"]
    return BackendInputs(
        name=words["name"],
        exact_tokens=tuple(size for size in sizes if isinstance(size, int)),
        multiples_tokens=tuple(size["multiple_of"] for size in sizes if isinstance(size, dict)),
    )
