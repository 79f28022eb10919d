"""Own what each field of an engine's identity says, read from vLLM's configuration.

Every setting of vLLM is decided on: it is told here, it follows from one that is, or it changes no byte of K or V. The
tests hold the list of decisions, and fail when vLLM has a setting that is not in it.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from platform import machine
from typing import Any, Final

from blake3 import blake3

from kvlease.integrations.vllm.identity.weights import digest_of_weights

FIELDS: Final = (
    "format", "model", "revision", "weights", "code", "load_format", "dtype", "quantization", "arithmetic", "overrides",
    "config", "kv_dtype", "block_tokens", "hash_tokens", "layout", "hash_algorithm", "hash_seed", "ranks", "draft",
    "adapters", "device",
)  # fmt: skip
"""The fields of an identity, in the order of their short digests."""

DIGEST_CHARACTERS: Final = 12
RANDOM_SEED: Final = "random"
"""The seed of hashes that differs in every process."""

_DEFAULT_SEED: Final = "vllm-none-hash"
_NO_PART_OF_THE_CONFIG: Final = frozenset({"_commit_hash", "_name_or_path", "transformers_version"})
"""Fields of a model's configuration that change no byte, or that are identity fields themselves."""
_LOADED_ALIKE: Final = frozenset({"", "auto", "hf"})
"""Ways to load weights that choose the files by what is there."""
_OF_CODE: Final = ("model_impl", "model_class_overrides", "trust_remote_code", "code_revision")
"""Settings that choose the code of the model."""
_OF_KERNELS: Final = ("moe_backend", "linear_backend", "linear_backend_per_quant")
"""Settings of kernels that quantise activations or weights in their own way, or not."""
_OF_STATES: Final = ("backend", "enable_stochastic_rounding", "stochastic_rounding_philox_rounds")
_OF_DIFFUSION: Final = ("canvas_length", "max_denoising_steps")
_OF_ATTENTION: Final = (
    "backend", "backend_per_kind", "use_non_causal", "flash_attn_version", "use_trtllm_attention",
    "disable_flashinfer_q_quantization", "use_prefill_query_quantization", "indexer_kv_dtype", "indexer_sparse_logits",
)  # fmt: skip
"""Settings of attention by which a backend packs a page in its own way, or computes other bytes."""
_OF_THE_CACHE: Final = (
    "mamba_cache_dtype", "mamba_ssm_cache_dtype", "use_replayssm", "replayssm_buffer_len", "kv_sharing_fast_prefill",
    "swa_bounded_replay",
)  # fmt: skip
"""Settings of the cache that decide what of a token is in it."""
_OF_MEDIA: Final = (
    "language_model_only", "media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype",
    "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
"""Settings of an engine that change what it makes of an image, of which vLLM's hash of the image knows nothing."""
_OF_ADAPTERS: Final = (
    "lora_dtype", "target_modules", "default_mm_loras", "enable_tower_connector_lora", "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)  # fmt: skip
"""Settings of an engine that change what an adapter (LoRA) does, or to what."""
_OF_RANKS: Final = (
    "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size",
    "cp_kv_cache_interleave_size",
)  # fmt: skip
_OF_THE_DRAFT: Final = (
    "method", "model", "revision", "code_revision", "quantization", "kv_cache_dtype", "attention_backend",
    "moe_backend", "max_model_len", "draft_tensor_parallel_size", "parallel_drafting", "use_heterogeneous_vocab",
    "index_share_for_mtp_iteration",
)  # fmt: skip
"""Settings of a draft model, whose K and V lie in the same blocks."""
_OF_THE_ENVIRONMENT: Final = tuple(
    f"VLLM_{name}"
    for name in (
        "B12X_MOE_FP4_FORCE_A16", "BATCH_INVARIANT", "CPU_INT4_W4A8",
        "DEEPEPLL_NVFP4_DISPATCH", "DISABLED_KERNELS", "FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
        "FLOAT32_MATMUL_PRECISION", "HUMMING_INPUT_QUANT_CONFIG", "HUMMING_ONLINE_QUANT_CONFIG",
        "HUMMING_USE_F16_ACCUM", "MARLIN_INPUT_DTYPE", "MEDIA_CONNECTOR",
        "MODEL_REDIRECT_PATH", "MOE_ROUTING_SIMULATION_STRATEGY", "MOE_USE_DEEP_GEMM",
        "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "ROCM_QUICK_REDUCE_QUANTIZATION",
        "ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB",
        "ROCM_SHUFFLE_KV_CACHE_LAYOUT", "ROCM_USE_AITER", "ROCM_USE_AITER_FP4BMM",
        "ROCM_USE_AITER_FP4_ASM_GEMM", "ROCM_USE_AITER_FP8BMM", "ROCM_USE_AITER_MOE_A4W4_DSV4",
        "SSM_CONV_STATE_LAYOUT", "TEST_FORCE_LOAD_FORMAT", "USE_DEEP_GEMM",
        "USE_DEEP_GEMM_E8M0", "USE_FLASHINFER_MOE_INT4", "USE_MODELSCOPE",
        "VIDEO_LOADER_BACKEND", "XPU_INC_WNA16_BACKEND",
    )
)  # fmt: skip
"""Variables by which weights, activations or media become others, or are laid out otherwise."""
_LONG_TOKENS: Final = 32_768
"""Llama 4 scales its queries with their positions if the longest request is longer than this."""


def fields_of(vllm_config: Any, kv_cache_config: Any, weights: str) -> dict[str, str]:
    """Return one text for each of FIELDS; `weights` identifies the weights, if it is set.

    Raises:
        OSError: the model's files cannot be read.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    loading = getattr(vllm_config, "load_config", None)
    algorithm = str(cache.prefix_caching_hash_algo)
    return {
        "format": _vllm_format(),
        "model": str(model.model),
        "revision": _commit_of(model),
        "weights": weights or digest_of_weights(str(model.model)),
        "code": _told(model, _OF_CODE),
        "load_format": _loading_of(model, loading),
        "dtype": str(model.dtype),
        "quantization": _quantization_of(model),
        "arithmetic": _arithmetic_of(vllm_config),
        "overrides": f"{_plain(getattr(model, 'hf_overrides', None))}{_media_of(model, weights)}",
        "config": f"{_config_of(model)}{_rope_of(model)}{_temperature_of(model)}",
        "kv_dtype": _kv_dtype_of(cache, kv_cache_config),
        "block_tokens": _block_tokens(cache, kv_cache_config),
        "hash_tokens": str(getattr(kv_cache_config, "hash_block_size", None)),
        "layout": f"{getattr(kv_cache_config, 'kv_cache_layout', None)}{_backend_of(vllm_config)}",
        "hash_algorithm": algorithm,
        "hash_seed": _seed_of(algorithm),
        "ranks": _told(vllm_config.parallel_config, _OF_RANKS),
        "draft": _draft_of(vllm_config, weights),
        "adapters": _told(getattr(vllm_config, "lora_config", None), _OF_ADAPTERS),
        "device": _device_of(vllm_config),
    }


def addresses_of(vllm_config: Any) -> str:
    """Return where vLLM streams the weights of the model, or of its draft, from; empty if they are files here."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    return _address_of(vllm_config.model_config) or _address_of(draft)


def _told(config: Any, names: Iterable[str]) -> str:
    """Return settings of a configuration by name; empty if there is no such configuration."""
    if config is None:
        return ""
    return ", ".join(f"{name} {_text(getattr(config, name, None))}" for name in names)


def digest_of(*texts: str) -> bytes:
    """Return the 32-byte digest of texts."""
    parts = []
    for text in texts:
        encoded = text.encode()
        parts += [len(encoded).to_bytes(8, "little"), encoded]
    return blake3(b"".join(parts)).digest()


def _text(value: Any) -> str:
    """Return a setting as text, the same in every process."""
    if isinstance(value, Mapping):
        return _plain({str(key): value[key] for key in value})
    return _plain(value) if isinstance(value, list | tuple) else _steady(value)


def _vllm_format() -> str:
    """Return the vLLM release whose KV format the bytes have; all patches of a release share it."""
    try:
        from vllm import __version__ as version  # noqa: PLC0415 - absent where only names are computed
    except ImportError:
        version = "unknown"
    return ".".join(str(version).split(".")[:2])


def _commit_of(model: Any) -> str:
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    revision = str(getattr(model, "revision", None) or "")
    if commit and getattr(model, "hf_config_path", None):
        # The commit is that of the configuration, which is not where the weights are.
        return f"{commit}, {revision}"
    return str(commit or revision)


def _config_of(model: Any) -> str:
    """Return a digest of the model's configuration; empty if its commit says what is in it."""
    overrides = getattr(model, "hf_overrides", None)
    config = getattr(model, "hf_config", None)
    if not callable(overrides):
        if getattr(config, "_commit_hash", None):
            return ""
        config = _config_as_loaded(model)
    told = getattr(config, "to_dict", None)
    fields = {} if told is None else told()
    kept = {name: value for name, value in fields.items() if name not in _NO_PART_OF_THE_CONFIG}
    text = json.dumps(kept, sort_keys=True, default=_steady)
    return digest_of(text).hex()[:DIGEST_CHARACTERS]


def _config_as_loaded(model: Any) -> Any:
    """Load the model's configuration anew: some models change it as they are built, which only workers see."""
    try:
        from vllm.transformers_utils.config import (  # noqa: PLC0415 - absent where only names are computed
            get_config,
        )

        return get_config(
            model.hf_config_path or model.model,
            model.trust_remote_code,
            model.revision,
            model.code_revision,
            model.config_format,
        )
    except Exception:  # noqa: BLE001 - the code of a model may raise anything
        return model.hf_config


def _steady(value: Any) -> str:
    """Return the text of a value, which must be the same in every process."""
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _rope_of(model: Any) -> str:
    """Return which factors a longrope model uses for its keys: vLLM chooses them once, by the longest request."""
    text = getattr(model, "hf_text_config", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    ropes = rope.values() if isinstance(rope, Mapping) and "rope_type" not in rope else (rope,)
    for one in ropes:
        if isinstance(one, Mapping) and one.get("rope_type", one.get("type")) == "longrope":
            short_tokens = one.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", 0
            )
            return ", long factors" if model.max_model_len > short_tokens else ", short factors"
    return ""


def _temperature_of(model: Any) -> str:
    """Return whether a Llama 4 scales queries with their positions, as vLLM decides it when it builds the model."""
    if not any("Llama4" in name for name in getattr(model, "architectures", None) or ()):
        return ""
    said = {**model.try_get_generation_config(), **model.override_generation_config}
    scales = said.get("attn_temperature_tuning", model.max_model_len > _LONG_TOKENS)
    return f", attn_temperature_tuning {scales}"


def _address_of(model: Any) -> str:
    return str(getattr(model, "model_weights", "") or "")


def _loading_of(model: Any, loading: Any) -> str:
    """Return what decides which weights are loaded of those that are there."""
    load_format = str(getattr(loading, "load_format", ""))
    # Dummy weights are made from the seed.
    said = f"dummy, seed {model.seed}" if load_format == "dummy" else load_format
    parts = [
        "" if load_format in _LOADED_ALIKE else said,
        *(
            f"{name} {_text(value)}"
            for name in ("model_loader_extra_config", "ignore_patterns")
            if (value := getattr(loading, name, None))
        ),
        _address_of(model),
    ]
    return ", ".join(part for part in parts if part)


def _media_of(model: Any, weights: str) -> str:
    """Return what is made of images; an encoder's scales count by content, or are those of `weights` if it is set."""
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is None:
        return ""
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    told = f", {_told(multimodal, _OF_MEDIA)}"
    if not scales:
        return told
    if weights:
        return f"{told}, scales of the weights"
    return f"{told}, scales {digest_of(Path(scales).read_text()).hex()[:DIGEST_CHARACTERS]}"


def _quantization_of(model: Any) -> str:
    """Return how weights are quantised; some ways are refined by settings that are not in the model's files."""
    settings = getattr(model, "quantization_config", None)
    said = str(getattr(model, "quantization", None))
    return f"{said}, {_plain(settings)}" if settings else said


def _arithmetic_of(vllm_config: Any) -> str:
    """Return what changes the values that are computed with given weights, by more than the order of sums."""
    parts = [
        _told(getattr(vllm_config, "kernel_config", None), _OF_KERNELS),
        _told(vllm_config.parallel_config, ("all2all_backend",)),
        _told(getattr(vllm_config, "mamba_config", None), _OF_STATES),
        _told(getattr(vllm_config, "diffusion_config", None), _OF_DIFFUSION),
        _told(vllm_config, ("additional_config",)),
        *(f"{name} {os.environ[name]}" for name in _OF_THE_ENVIRONMENT if os.environ.get(name)),
    ]
    return "; ".join(part for part in parts if part)


def _kv_dtype_of(cache: Any, kv_cache_config: Any) -> str:
    """Return the element types of K and V, and of recurrent states, and what of a token is kept."""
    # A worker names the type of latent vectors anew when it builds the model.
    found = {
        str(name)
        for spec in _specs(kv_cache_config)
        if (name := getattr(spec, "cache_dtype_str", None))
    }
    said = " and ".join(sorted(found)) or cache.cache_dtype
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", [])
    return f"{said} but {skipped}, {_told(cache, _OF_THE_CACHE)}"


def _backend_of(vllm_config: Any) -> str:
    """Return what was asked of attention."""
    attention = getattr(vllm_config, "attention_config", None)
    found = {name: getattr(attention, name, None) for name in _OF_ATTENTION}
    return "".join(f", {name} {_text(one)}" for name, one in found.items() if one not in (None, {}))


def _device_of(vllm_config: Any) -> str:
    """Return the kind of device; for CPUs, with what decides how attention packs keys."""
    kind = str(getattr(getattr(vllm_config, "device_config", None), "device_type", "unknown"))
    if kind != "cpu":
        return kind
    try:
        from torch import cpu  # noqa: PLC0415 - absent where only names are computed
    except ImportError:
        return f"{kind}, {machine()}"
    has_amx = getattr(cpu, "_is_amx_tile_supported", bool)()
    return f"{kind}, {machine()}{', AMX' if has_amx else ''}"


def _block_tokens(cache: Any, kv_cache_config: Any) -> str:
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    if not groups:
        return str(cache.block_size)
    return ", ".join(str(group.kv_cache_spec.block_size) for group in groups)


def _specs(kv_cache_config: Any) -> Iterator[Any]:
    """Return what vLLM says of each kind of layer."""
    for group in getattr(kv_cache_config, "kv_cache_groups", None) or ():
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        yield from inner.values() if inner else (group.kv_cache_spec,)


def _seed_of(algorithm: str) -> str:
    """Return the seed of vLLM's first hash, as vLLM chooses it."""
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        return f"PYTHONHASHSEED {seed}"
    return _DEFAULT_SEED if algorithm.startswith("sha256") else RANDOM_SEED


def _draft_of(vllm_config: Any, weights: str) -> str:
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return ""
    draft = getattr(speculative, "draft_model_config", None)
    parts = [
        _told(speculative, _OF_THE_DRAFT),
        f"commit {_commit_of(draft)}",
        f"weights {weights or digest_of_weights(str(getattr(speculative, 'model', '')))}",
        _loading_of(draft, getattr(speculative, "draft_load_config", None)),
    ]
    return ", ".join(part for part in parts if part)


def _plain(overrides: Any) -> str:
    """Return overrides of the model's configuration as text; for a function, its qualified name."""
    if callable(overrides):
        return f"{overrides.__module__}.{overrides.__qualname__}"
    return json.dumps(overrides or {}, sort_keys=True, default=_steady)
