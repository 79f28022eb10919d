"""Own the identity of an engine's bytes, its digest and the names made from it; the plan says where each byte lies.

An `Identity` is a list of named fields, read from vLLM's configuration alone, so that all processes of an engine get
the same one. It travels as the plan's `model_digest`: a digest of all fields, and a short digest of each, so that a
refusal can name the fields in which two engines differ.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from platform import machine
from typing import Any, Final, Self

from blake3 import blake3

from kvlease.integrations.vllm.weights import digest_of_weights

FIELDS: Final = (
    "format", "model", "revision", "weights", "load_format", "dtype", "quantization", "overrides", "config", "kv_dtype",
    "block_tokens", "hash_tokens", "layout", "hash_algorithm", "hash_seed", "ranks", "draft", "adapters", "device",
)  # fmt: skip
"""The fields of an identity, in the order of their short digests."""

_PREFIX: Final = "vllm1"
_FIELD_CHARACTERS: Final = 8
_DEFAULT_SEED: Final = "vllm-none-hash"
_RANDOM_SEED: Final = "random"
_NO_PART_OF_THE_CONFIG: Final = frozenset({"_commit_hash", "_name_or_path", "transformers_version"})
"""Fields of a model's configuration that change no byte, or that are identity fields themselves."""
_LOADED_ALIKE: Final = frozenset({"", "auto", "hf"})
"""Ways to load weights that choose the files by what is there."""
_OF_MEDIA: Final = (
    "mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
    "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
"""Settings of an engine that change what it makes of an image, of which vLLM's hash of the image knows nothing."""
_OF_ADAPTERS: Final = (
    "lora_dtype", "target_modules", "default_mm_loras", "enable_tower_connector_lora", "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)  # fmt: skip
"""Settings of an engine that change what an adapter (LoRA) does, or to what."""
_NAME_CHARACTERS: Final = 24
_DIGEST_CHARACTERS: Final = 12


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that an engine's bytes depend on, except for their places."""

    values: tuple[str, ...]
    """One text for each of FIELDS."""
    refusal: str = ""
    """Why nobody can find this engine's blocks, and what to change; empty if they can be found."""
    has_adapters: bool = False
    """Whether requests may use adapters (LoRA), which vLLM's hashes tell apart only by name and path."""

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any = None, *, weights: str = "") -> Self:
        """Read the identity of an engine; `weights` identifies its weights, if it is set."""
        refusal = ""
        try:
            read = _fields(vllm_config, kv_cache_config, weights)
        except OSError as error:
            refusal = f"the model's files cannot be read ({error}); set `weights` to a text that identifies its weights"
            read = _fields(vllm_config, kv_cache_config, "unknown")
        if (address := _address_of(vllm_config.model_config)) and not weights:
            refusal = (
                f"the model's weights are at {address}, where they can be replaced unnoticed; "
                "set `weights` to a text that identifies them"
            )
        if read["hash_seed"] == _RANDOM_SEED:
            refusal = (
                f"prefix_caching_hash_algo {read['hash_algorithm']} has a different random seed in every engine; "
                "use sha256, or set PYTHONHASHSEED to the same value everywhere"
            )
        has_adapters = getattr(vllm_config, "lora_config", None) is not None
        return cls(tuple(read[name] for name in FIELDS), refusal, has_adapters)

    def in_mode(self, mode: str) -> Self:
        """Return the identity with the mode added to its format, for modes that use a pool in their own way.

        An owned-memory engine takes all blocks of its pool, so another engine that shared the pool would wait for ever.
        """
        at = FIELDS.index("format")
        values = (*self.values[:at], f"{self.values[at]}, {mode}", *self.values[at + 1 :])
        return replace(self, values=values)

    @property
    def digest(self) -> bytes:
        """The 32-byte digest of all fields."""
        return _digest(*self.values)

    @property
    def model_digest(self) -> str:
        """The identity in the form that the plan carries: the digest of all fields, then a short digest of each."""
        short = "".join(_digest(value).hex()[:_FIELD_CHARACTERS] for value in self.values)
        return f"{_PREFIX}:{self.digest.hex()}:{short}"

    def differing(self, model_digest: str) -> list[str]:
        """Return the fields in which an identity, given as a plan carries it, differs; empty if the two are equal."""
        if model_digest == self.model_digest:
            return []
        prefix, _, rest = model_digest.partition(":")
        _, _, theirs = rest.partition(":")
        own = self.model_digest.rpartition(":")[2]
        if prefix != _PREFIX or len(theirs) != len(own):
            return [
                "the form of the identity: the cache is not vLLM's, or another version of kvlease made it"
            ]
        pairs = zip(FIELDS, self.values, _pieces(own), _pieces(theirs), strict=True)
        return [f"{name} (here {value[:60]})" for name, value, one, other in pairs if one != other]

    def cache_name(self, mode: str) -> str:
        """Return the name of the cache that engines of this identity share in a mode such as "offload"."""
        model = re.sub(r"[^a-z0-9]+", "-", Path(self.values[FIELDS.index("model")]).name.lower())
        slug = model.strip("-")[:_NAME_CHARACTERS].strip("-") or "model"
        return f"vllm-{mode}-{slug}-{self.digest.hex()[:_DIGEST_CHARACTERS]}"


def magazine_name(vllm_config: Any, mode: str) -> str:
    """Return the name of an engine's magazine in a mode: the same in all its processes, and in no other engine."""
    transfer = vllm_config.kv_transfer_config
    seen = _digest(
        str(getattr(transfer, "engine_id", "")), str(getattr(vllm_config, "instance_id", ""))
    )
    return f"vllm-{mode}-{seen.hex()[:32]}"


def _fields(vllm_config: Any, kv_cache_config: Any, weights: str) -> dict[str, str]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    return {
        "format": _vllm_format(),
        "model": str(model.model),
        "revision": _commit_of(model),
        "weights": weights or digest_of_weights(str(model.model)),
        "load_format": _loading_of(model, getattr(vllm_config, "load_config", None)),
        "dtype": str(model.dtype),
        "quantization": _quantization_of(model),
        "overrides": f"{_plain(getattr(model, 'hf_overrides', None))}{_media_of(model)}",
        "config": f"{_config_of(model)}{_rope_of(model)}",
        "kv_dtype": _kv_dtype_of(cache),
        "block_tokens": _block_tokens(cache, kv_cache_config),
        "hash_tokens": str(getattr(kv_cache_config, "hash_block_size", None)),
        "layout": f"{getattr(kv_cache_config, 'kv_cache_layout', None)}{_backend_of(vllm_config)}",
        "hash_algorithm": algorithm,
        "hash_seed": _seed_of(algorithm),
        "ranks": _ranks_of(vllm_config.parallel_config),
        "draft": _draft_of(getattr(vllm_config, "speculative_config", None), weights),
        "adapters": _adapters_of(getattr(vllm_config, "lora_config", None)),
        "device": _device_of(vllm_config),
    }


def _digest(*texts: str) -> bytes:
    parts = []
    for text in texts:
        encoded = text.encode()
        parts += [len(encoded).to_bytes(8, "little"), encoded]
    return blake3(b"".join(parts)).digest()


def _pieces(short: str) -> Iterator[str]:
    return (
        short[at : at + _FIELD_CHARACTERS]
        for at in range(0, len(FIELDS) * _FIELD_CHARACTERS, _FIELD_CHARACTERS)
    )


def _vllm_format() -> str:
    """Return the vLLM release whose KV format the bytes have; all patches of a release share it."""
    try:
        from vllm import __version__ as version  # noqa: PLC0415 - absent where only names are computed
    except ImportError:
        version = "unknown"
    return ".".join(str(version).split(".")[:2])


def _commit_of(model: Any) -> str:
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    return str(commit or getattr(model, "revision", None) or "")


def _config_of(model: Any) -> str:
    """Return a digest of the model's configuration, wherever it was loaded from."""
    told = getattr(getattr(model, "hf_config", None), "to_dict", None)
    fields = {} if told is None else told()
    kept = {name: value for name, value in fields.items() if name not in _NO_PART_OF_THE_CONFIG}
    return _digest(json.dumps(kept, sort_keys=True, default=_steady)).hex()[:_DIGEST_CHARACTERS]


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


def _address_of(model: Any) -> str:
    """Return where vLLM streams the weights from, if they are no files here."""
    return str(getattr(model, "model_weights", "") or "")


def _loading_of(model: Any, loading: Any) -> str:
    """Return what decides which weights are loaded of those that are there."""
    load_format = str(getattr(loading, "load_format", ""))
    # Dummy weights are made from the seed.
    said = f"dummy, seed {model.seed}" if load_format == "dummy" else load_format
    extra = getattr(loading, "model_loader_extra_config", None)
    parts = [
        "" if load_format in _LOADED_ALIKE else said,
        _plain(extra) if extra else "",
        _address_of(model),
    ]
    return ", ".join(part for part in parts if part)


def _media_of(model: Any) -> str:
    multimodal = getattr(model, "multimodal_config", None)
    found = {name: getattr(multimodal, name, None) for name in _OF_MEDIA}
    kept = {name: value for name, value in found.items() if value is not None}
    return f", {_plain(kept)}" if kept else ""


def _quantization_of(model: Any) -> str:
    """Return how weights are quantised; some ways are refined by settings that are not in the model's files."""
    settings = getattr(model, "quantization_config", None)
    said = str(getattr(model, "quantization", None))
    return f"{said}, {_plain(settings)}" if settings else said


def _adapters_of(lora: Any) -> str:
    if lora is None:
        return ""
    return ", ".join(f"{name} {getattr(lora, name, None)}" for name in _OF_ADAPTERS)


def _kv_dtype_of(cache: Any) -> str:
    """Return the element types of K and V, and of recurrent states."""
    names = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
    states = ", ".join(f"{name} {getattr(cache, name, 'auto')}" for name in names)
    return f"{cache.cache_dtype} but {getattr(cache, 'kv_cache_dtype_skip_layers', [])}, {states}"


def _backend_of(vllm_config: Any) -> str:
    """Return what was asked of attention: some backends pack a page in their own way, or compute other bytes."""
    attention = getattr(vllm_config, "attention_config", None)
    names = ("backend", "backend_per_kind", "use_non_causal")
    found = {name: getattr(attention, name, None) for name in names}
    return "".join(f", {name} {one}" for name, one in found.items() if one)


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


def _seed_of(algorithm: str) -> str:
    """Return the seed of vLLM's first hash, as vLLM chooses it."""
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        return f"PYTHONHASHSEED {seed}"
    return _DEFAULT_SEED if algorithm.startswith("sha256") else _RANDOM_SEED


def _ranks_of(parallel: Any) -> str:
    names = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "cp_kv_cache_interleave_size",
    )
    return ", ".join(f"{name} {getattr(parallel, name, 1)}" for name in names)


def _draft_of(speculative: Any, weights: str) -> str:
    if speculative is None:
        return ""
    names = ("method", "model", "revision", "quantization", "kv_cache_dtype")
    said = ", ".join(f"{name} {getattr(speculative, name, None)}" for name in names)
    return f"{said}, weights {weights or digest_of_weights(str(getattr(speculative, 'model', '')))}"


def _plain(overrides: Any) -> str:
    """Return overrides of the model's configuration as text; for a function, its qualified name."""
    if callable(overrides):
        return f"{overrides.__module__}.{overrides.__qualname__}"
    return json.dumps(overrides or {}, sort_keys=True, default=_steady)
