"""Own DeepSeek V2, V3, V3.2 and similar models: one latent vector for each token, and in V3.2 an indexer's keys."""

from typing import Final

from kvlease.errors import InvalidError
from kvlease.geometry import ceil_div, round_up
from kvlease.spec import MLA, LayerSpec
from kvleased.planning.models.kv_format import KVFormat, kv_format
from kvleased.planning.models.model import Model
from kvleased.planning.models.parsing import Config

SPARSE_FORMAT: Final = "fp8_ds_mla"
"""How models with an indexer keep their latents unless told otherwise: as they were published."""

_BYTES_OF_FORMAT: Final = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a latent of 512 elements and 64 rotary ones: fp8 takes 512 + 4 * 4 of scales + 64 * 2."""
_PACKED_LATENT: Final = (512, 64)
_UNSKIPPED_LAYERS: Final = 2
_SPARSE_BLOCK_TOKENS: Final = 64
"""Tokens of the blocks that the kernels of sparse attention and its indexer read."""
_INDEX_ELEMENTS_PER_SCALE: Final = 128
_SCALE_BYTES: Final = 4


def latent(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of DeepSeek V2, V3 and Kimi K2; if `index_topk` says that there is an indexer, those of V3.2.

    Raises:
        InvalidError: a field is missing, or the cache type is not one for latents.
    """
    if model.config.value("index_topk"):
        return _sparse(model)
    return tuple(
        latent_layer(model, f"model.layers.{index}.self_attn")
        for index in range(model.config.num_layers)
    )


def latent_layer(model: Model, name: str) -> MLA:
    """Return a layer that keeps a latent of every token; all tensor ranks keep the same latents.

    Raises:
        InvalidError: a field is missing, or the cache type is not one for latents.
    """
    return _latent(model, name, latent_format(model, ""), model.tokens_per_block)


def latent_format(model: Model, default: str) -> KVFormat:
    """Return how latents are kept; `default` is the cache type if none is asked for.

    Raises:
        InvalidError: the cache type is not one for latents.
    """
    kv = kv_format(model.kv_dtype or default, model.config.dtype)
    if kv.quantisation not in ("none", "fp8_per_tensor") and not kv.packed_format:
        message = (
            f"kv_dtype {model.kv_dtype!r} is for the K and V of heads, but this model keeps one latent; give bfloat16, "
            "fp8 or fp8_ds_mla"
        )
        raise InvalidError(message, resource="kv_dtype", rule="kv_dtype_not_for_model")
    return kv


def index_head_bytes(head_size: int) -> int:
    """Return the bytes of an indexer's key: one for each element, and a scale of 4 bytes for every 128 elements."""
    return head_size + ceil_div(head_size, _INDEX_ELEMENTS_PER_SCALE) * _SCALE_BYTES


def _sparse(model: Model) -> tuple[LayerSpec, ...]:
    """Return latents; a layer that selects tokens itself also keeps the keys of its indexer."""
    config = model.config
    fp8 = ("", "fp8", "fp8_e4m3", "float8_e4m3fn", "fp8_per_tensor")
    kv = (
        kv_format(SPARSE_FORMAT, None)
        if model.kv_dtype in fp8
        else latent_format(model, SPARSE_FORMAT)
    )
    tokens = round_up(model.tokens_per_block, _SPARSE_BLOCK_TOKENS)
    selecting = _selecting_layers(config)
    layers: list[LayerSpec] = []
    for index in range(config.num_layers):
        name = f"model.layers.{index}.self_attn"
        leads = index in selecting
        layers.append(_latent(model, name, kv, tokens, leads=leads))
        if leads:
            layers.append(_indexer(model, f"{name}.indexer", tokens))
    return tuple(layers)


def _selecting_layers(config: Config) -> set[int]:
    """Return the places of the layers that select tokens themselves; the others reuse the selection before them."""
    places = range(config.num_layers)
    types = config.words("indexer_types")
    if types:
        return {place for place, kind in zip(places, types, strict=False) if kind == "full"}
    every = config.optional_count("index_topk_freq") or 1
    skipped = config.optional_count("index_skip_topk_offset") or _UNSKIPPED_LAYERS
    return {place for place in places if max(place - skipped + 1, 0) % every == 0}


def _latent(model: Model, name: str, kv: KVFormat, tokens: int, *, leads: bool = False) -> MLA:
    rank, rotary = model.config.count("kv_lora_rank"), model.config.count("qk_rope_head_dim")
    packed = _BYTES_OF_FORMAT.get(kv.packed_format)
    if packed is not None and (rank, rotary) != _PACKED_LATENT:
        message = (
            f"kv_dtype {kv.packed_format!r} packs latents of 512 elements and 64 rotary ones, but this model has "
            f"kv_lora_rank {rank} and qk_rope_head_dim {rotary}; give bfloat16 or fp8"
        )
        raise InvalidError(message, resource="kv_dtype", rule="kv_dtype_not_for_model")
    is_fp8 = kv.quantisation == "fp8_per_tensor" and packed is None
    return MLA(
        name=name,
        tokens_per_block=tokens,
        head_size=rank + rotary,
        dtype=kv.dtype,
        quantisation=kv.quantisation,
        num_head_slots=1 if kv.quantisation == "nvfp4" else None,
        bytes_per_state_packed=packed,
        packed_format="fp8" if is_fp8 else kv.packed_format,
        leads_index_group=leads,
    )


def _indexer(model: Model, name: str, tokens: int) -> MLA:
    return MLA(
        name=name,
        tokens_per_block=tokens,
        head_size=index_head_bytes(model.config.count("index_head_dim")),
        dtype="uint8",
        role="indexer",
    )
