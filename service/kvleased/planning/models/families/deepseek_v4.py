"""Own DeepSeek V4: every layer keeps latents of a window, and most layers keep compressed latents beside it.

A layer that compresses r tokens into a state keeps the states of all tokens, and the compressor's inputs as a window.
At r = 4 it keeps the same two again for the indexer. Kernels read blocks of 256 tokens, and of 64 for windows.
"""

from dataclasses import dataclass
from typing import Final

from kvlease.errors import InvalidError
from kvlease.spec import MLA, LayerSpec, SlidingWindowMLA
from kvleased.planning.models.families.latent import (
    SPARSE_FORMAT,
    index_head_bytes,
    latent_format,
)
from kvleased.planning.models.kv_format import KVFormat, kv_format
from kvleased.planning.models.model import Model
from kvleased.planning.models.refusals import bad_field, unknown_architecture

_BLOCK_TOKENS: Final = 256
_WINDOW_BLOCK_TOKENS: Final = 64
_PACKED_HEAD: Final = 512
_PACKED_BYTES: Final = 584
"""Bytes of a packed latent of 512 elements: 448 of fp8, 64 rotary elements of 2 bytes each, 8 of scales."""
_PAGE_MULTIPLE_BYTES: Final = 576
_PAGE_MULTIPLE_BYTES_PLAIN: Final = 512
_VERSION: Final = "deepseek_v4"
_FP8_NAMES: Final = ("", "fp8", "fp8_e4m3", "float8_e4m3fn", "fp8_per_tensor", SPARSE_FORMAT)
_RATIO_OF_KIND: Final = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compressor:
    """What a compressor of a given number of tokens into one state keeps of its inputs."""

    overlap: int
    """How many neighbouring states include one token."""
    block_tokens: int


_COMPRESSORS: Final = {
    4: _Compressor(overlap=2, block_tokens=4),
    128: _Compressor(overlap=1, block_tokens=8),
}
_INDEXED_RATIO: Final = 4


def deepseek_v4(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of DeepSeek V4.

    Raises:
        InvalidError: a field is missing, or names an unknown compression.
    """
    kv = _format(model)
    layers: list[LayerSpec] = []
    for index, ratio in enumerate(_ratios(model)):
        name = f"model.layers.{index}.attn"
        if ratio == _INDEXED_RATIO:
            layers += _indexer(model, f"{name}.indexer", kv)
        layers.append(_window(model, f"{name}.swa_cache", kv))
        if ratio:
            head_size = model.config.count("head_dim")
            layers.append(_compressed(name, kv, head_size, ratio))
            layers.append(_inputs(f"{name}.compressor", kv, head_size, ratio))
    return tuple(layers)


def _format(model: Model) -> KVFormat:
    """Return how latents are kept: packed in fp8, as published, or plainly."""
    if model.kv_dtype not in _FP8_NAMES:
        kv = latent_format(model, SPARSE_FORMAT)
        if kv.packed_format or kv.quantisation != "none":
            message = f"kv_dtype {model.kv_dtype!r} cannot be used with DeepSeek V4; give bfloat16 or {SPARSE_FORMAT}"
            raise InvalidError(message, resource="kv_dtype", rule="kv_dtype_not_for_model")
        return kv
    head_size = model.config.count("head_dim")
    if head_size != _PACKED_HEAD:
        raise bad_field("head_dim", head_size, f"but {SPARSE_FORMAT} packs heads of {_PACKED_HEAD}")
    return kv_format(SPARSE_FORMAT, None)


def _ratios(model: Model) -> tuple[int, ...]:
    """Return how many tokens each layer compresses into a state; 0 for a layer that keeps only a window."""
    config = model.config
    num_layers = config.num_layers
    kinds = config.words("layer_types")
    unknown = sorted(set(kinds) - set(_RATIO_OF_KIND))
    if unknown:
        raise unknown_architecture(f"the field 'layer_types' has {', '.join(unknown)}")
    ratios = tuple(_RATIO_OF_KIND[kind] for kind in kinds) or config.counts("compress_ratios")
    if len(ratios) < num_layers:
        why = f"which are {len(ratios)} layers, but num_hidden_layers is {num_layers}"
        raise bad_field("compress_ratios", ratios, why)
    others = sorted(set(ratios) - {0, *_COMPRESSORS})
    if others:
        raise bad_field(
            "compress_ratios",
            others,
            f"but the known values are 0, {', '.join(map(str, _COMPRESSORS))}",
        )
    return ratios[:num_layers]


def _window(model: Model, name: str, kv: KVFormat) -> SlidingWindowMLA:
    return SlidingWindowMLA(
        name=name,
        tokens_per_block=_WINDOW_BLOCK_TOKENS,
        head_size=model.config.count("head_dim"),
        dtype=kv.dtype,
        quantisation=kv.quantisation,
        bytes_per_state_packed=_packed_bytes(kv),
        window_tokens=model.config.count("sliding_window"),
        packed_format=kv.packed_format,
        page_multiple_bytes=_page_multiple(kv),
        model_version=_VERSION,
    )


def _compressed(name: str, kv: KVFormat, head_size: int, ratio: int) -> MLA:
    return MLA(
        name=name,
        tokens_per_block=_BLOCK_TOKENS,
        head_size=head_size,
        dtype=kv.dtype,
        quantisation=kv.quantisation,
        bytes_per_state_packed=_packed_bytes(kv),
        tokens_per_state=ratio,
        block_stride_multiple_tokens=_BLOCK_TOKENS,
        packed_format=kv.packed_format,
        page_multiple_bytes=_page_multiple(kv),
        model_version=_VERSION,
    )


def _indexer(model: Model, name: str, kv: KVFormat) -> tuple[LayerSpec, ...]:
    head_size = model.config.count("index_head_dim")
    keys = MLA(
        name=name,
        tokens_per_block=_BLOCK_TOKENS,
        head_size=index_head_bytes(head_size),
        dtype="uint8",
        tokens_per_state=_INDEXED_RATIO,
        block_stride_multiple_tokens=_BLOCK_TOKENS,
        page_multiple_bytes=_page_multiple(kv),
    )
    return keys, _inputs(f"{name}.compressor", kv, head_size, _INDEXED_RATIO)


def _inputs(name: str, kv: KVFormat, head_size: int, ratio: int) -> SlidingWindowMLA:
    """Return what a compressor keeps: a value and a weight of each element, for each state that includes the token."""
    compressor = _COMPRESSORS[ratio]
    return SlidingWindowMLA(
        name=name,
        tokens_per_block=compressor.block_tokens,
        head_size=2 * compressor.overlap * head_size,
        dtype="float32",
        window_tokens=compressor.overlap * ratio,
        page_multiple_bytes=_page_multiple(kv),
    )


def _packed_bytes(kv: KVFormat) -> int | None:
    return _PACKED_BYTES if kv.packed_format else None


def _page_multiple(kv: KVFormat) -> int:
    return _PAGE_MULTIPLE_BYTES if kv.packed_format else _PAGE_MULTIPLE_BYTES_PLAIN
