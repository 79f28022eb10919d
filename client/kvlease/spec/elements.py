"""Own the element types of a cache and the ways to quantise it, with their bytes."""

from typing import Final

from kvlease._checks import shown
from kvlease.errors import InvalidError
from kvlease.geometry import floor_div

BYTES_PER_ELEMENT: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Every element type of a cache, with its bytes."""

QUANTISATIONS: Final = (
    "none",
    "fp8_per_tensor",
    "int8_per_tensor",
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
    "nvfp4_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "ultraquant_4bit",
)
"""Every way to quantise K and V.

"per_token_head" means that each head of each token has its own scales. With the last five, the backend packs a state in
its own way, so the layer's spec must give the state's bytes.
"""

_SCALE_BYTES: Final = 8
"""Bytes of the scales of K and V that each head of a token has: two float32."""
_NVFP4_ELEMENTS_PER_SCALE: Final = 16


def bytes_of(dtype: str, of: str = "") -> int:
    """Return the bytes of one element; `of` says in a refusal whose element type it is.

    Raises:
        InvalidError: the type is unknown.
    """
    if dtype not in BYTES_PER_ELEMENT:
        message = f"dtype{of} must be one of {', '.join(BYTES_PER_ELEMENT)}, not {shown(dtype)}"
        raise InvalidError(message, resource="dtype", rule="unknown_dtype")
    return BYTES_PER_ELEMENT[dtype]


def packed_bytes_per_state(
    quantisation: str, head_size: int, head_size_v: int, bytes_per_element: int
) -> int:
    """Return the bytes that one head keeps of one token's K and V.

    per token and head: (head_size + head_size_v) * bytes_per_element + 8
    int4:               head_size // 2 + head_size_v // 2 + 8
    nvfp4:              head_size // 2 + head_size // 16, with K and V in head slots of their own
    else:               (head_size + head_size_v) * bytes_per_element
    """
    if quantisation == "nvfp4":
        return floor_div(head_size, 2) + floor_div(head_size, _NVFP4_ELEMENTS_PER_SCALE)
    if quantisation == "int4_per_token_head":
        return floor_div(head_size, 2) + floor_div(head_size_v, 2) + _SCALE_BYTES
    plain = (head_size + head_size_v) * bytes_per_element
    return plain + _SCALE_BYTES if quantisation.endswith("per_token_head") else plain


def head_slots_of(quantisation: str, num_kv_heads: int) -> int:
    """Return the head slots of a page: nvfp4 keeps K and V in slots of their own."""
    return 2 * num_kv_heads if quantisation == "nvfp4" else num_kv_heads
