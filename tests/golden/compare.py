"""Own when our answer agrees with a vector: which fields count, and how exactly."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_FLOAT_TOLERANCE = 1e-9
_SIZES_AND_STRIDES = (("shape", "stride"), ("shape_bytes_LBHNC", "strides_bytes_LBHNC"))


def mismatches(expected: Any, got: Any, where: str = "") -> Iterator[str]:
    """Yield a sentence for every place where `got` differs from the expected; it may have more fields than expected."""
    if isinstance(expected, Mapping):
        yield from _mapping_mismatches(expected, got, where)
    elif isinstance(expected, list):
        yield from _list_mismatches(expected, got, where)
    elif isinstance(expected, float) and isinstance(got, int | float):
        if not math.isclose(expected, got, rel_tol=_FLOAT_TOLERANCE, abs_tol=_FLOAT_TOLERANCE):
            yield f"{where}: expected {expected}, got {got}"
    elif type(expected) is not type(got) or expected != got:
        yield f"{where}: expected {_short(expected)}, got {_short(got)}"


def _mapping_mismatches(expected: Mapping[str, Any], got: Any, where: str) -> Iterator[str]:
    if not isinstance(got, Mapping):
        yield f"{where}: expected fields, got {_short(got)}"
        return
    if "error" in got and "error" not in expected:
        yield f"{where}.error: expected none, got {_short(got['error'])}"
        return
    pair = next((pair for pair in _SIZES_AND_STRIDES if pair[1] in expected), None)
    for name, value in expected.items():
        if name not in got:
            yield f"{where}.{name}: expected {_short(value)}, got nothing"
        elif name in ("error", "block_size_error"):
            yield from _error_mismatches(value, got[name], f"{where}.{name}")
        elif pair and name == pair[1]:
            yield from _stride_mismatches(expected[pair[0]], value, got[name], f"{where}.{name}")
        else:
            yield from mismatches(value, got[name], f"{where}.{name}")


def _list_mismatches(expected: list[Any], got: Any, where: str) -> Iterator[str]:
    if not isinstance(got, Sequence) or isinstance(got, str) or len(expected) != len(got):
        yield f"{where}: expected {len(expected)} entries, got {_short(got)}"
        return
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        wanted = one
        if isinstance(one, Mapping) and "same_as" in one:
            wanted = expected[one["same_as"]]
        yield from mismatches(wanted, other, f"{where}[{index}]")


def _error_mismatches(expected: Mapping[str, Any], got: Any, where: str) -> Iterator[str]:
    """Compare errors by class, and refusals for want of memory by their number, too."""
    if expected["class"].startswith("UNHANDLED_"):
        if got["class"].startswith("UNHANDLED_"):
            yield f"{where}: expected a clean refusal, got {_short(got)}"
        return
    for name in ("class", "estimated_max_model_len"):
        if name in expected and got.get(name) != expected[name]:
            yield f"{where}.{name}: expected {expected[name]}, got {_short(got)}"


def _stride_mismatches(
    shape: list[int], expected: list[int], got: Any, where: str
) -> Iterator[str]:
    """Compare strides except those of a dimension with one entry, which mean nothing."""
    if len(got) != len(expected):
        yield f"{where}: expected {expected}, got {got}"
        return
    for axis, extent in enumerate(shape):
        if extent != 1 and got[axis] != expected[axis]:
            yield f"{where}[{axis}]: expected {expected[axis]}, got {got[axis]}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
