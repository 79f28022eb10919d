"""Own what the names of cache types mean: an element type, and how K and V are packed into it."""

from dataclasses import dataclass
from typing import Final

from kvlease.errors import InvalidError
from kvlease.spec import BYTES_PER_ELEMENT

LATENT_FORMATS: Final = ("fp8_ds_mla", "nvfp4_ds_mla")
"""Cache types that only latent attention can have."""

_PLAIN: Final = ("float32", "float16", "bfloat16")
_BY_NAME: Final = {
    "fp8": ("float8_e4m3fn", "fp8_per_tensor"),
    "fp8_e4m3": ("float8_e4m3fn", "fp8_per_tensor"),
    "float8_e4m3fn": ("float8_e4m3fn", "fp8_per_tensor"),
    "fp8_per_tensor": ("float8_e4m3fn", "fp8_per_tensor"),
    "fp8_e5m2": ("float8_e5m2", "fp8_per_tensor"),
    "float8_e5m2": ("float8_e5m2", "fp8_per_tensor"),
    "fp8_per_token_head": ("float8_e4m3fn", "fp8_per_token_head"),
    "int8": ("int8", "int8_per_token_head"),
    "int8_per_token_head": ("int8", "int8_per_token_head"),
    "int8_per_tensor": ("int8", "int8_per_tensor"),
    "int4": ("uint8", "int4_per_token_head"),
    "int4_per_token_head": ("uint8", "int4_per_token_head"),
    "nvfp4": ("uint8", "nvfp4"),
    "fp8_ds_mla": ("uint8", "fp8_per_tensor"),
    "nvfp4_ds_mla": ("uint8", "nvfp4"),
}
KV_DTYPES: Final = (*_PLAIN, *_BY_NAME)
"""Every name of a cache type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """How K and V are kept."""

    dtype: str
    quantisation: str = "none"
    packed_format: str = ""
    """The name of the cache type if latent attention packs it; empty if it is kept plainly."""


def kv_format(kv_dtype: str, dtype: str | None) -> KVFormat:
    """Return what a cache type means; empty or "auto" stands for `dtype`, the model's own element type.

    Raises:
        InvalidError: there is no such type, or the model's own type is not known.
    """
    if kv_dtype in ("", "auto", *_PLAIN):
        return KVFormat(dtype=kv_dtype if kv_dtype in _PLAIN else model_dtype(dtype, ""))
    if kv_dtype not in _BY_NAME:
        message = f"kv_dtype {kv_dtype[:40]!r} is not one of {', '.join(KV_DTYPES)}"
        raise InvalidError(message, resource="kv_dtype", rule="unknown_kv_dtype")
    element_type, quantisation = _BY_NAME[kv_dtype]
    packed_format = kv_dtype if kv_dtype in LATENT_FORMATS else ""
    return KVFormat(dtype=element_type, quantisation=quantisation, packed_format=packed_format)


def model_dtype(dtype: str | None, kv_dtype: str) -> str:
    """Return the element type of a model: the one in its config, else a plain `kv_dtype`.

    Raises:
        InvalidError: neither says one, or it is unknown.
    """
    chosen = dtype or (kv_dtype if kv_dtype in _PLAIN else None)
    if chosen is None:
        message = "model_config has no dtype; set kv_dtype, for example to bfloat16"
        raise InvalidError(message, resource="kv_dtype", rule="missing_field")
    if chosen not in BYTES_PER_ELEMENT:
        message = (
            f"dtype {chosen[:40]!r} of the config is not one of {', '.join(BYTES_PER_ELEMENT)}"
        )
        raise InvalidError(message, resource="dtype", rule="unknown_dtype")
    return chosen
