"""Own the check that a caller's arguments fit the fields of a request; what they mean is the daemon's business."""

import operator
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from numpy.typing import ArrayLike

from kvlease._checks import check_encodable, check_range, wrong_type
from kvlease.errors import InvalidError
from kvlease.ids import ID_MAX, SEQUENCE_MAX
from kvlease.retention import SECONDS_RETAINED_MAX
from kvlease.units import TOKENS_MAX
from kvlease.v1 import kvlease_pb2 as pb

_BOUNDS: Final[Mapping[int, tuple[int, int]]] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call, and refuse None, which protobuf would take for a field left out.

    Raises:
        InvalidError: an argument is None, or is no number, text or bytes that the field of its name carries; the
            message names it.
    """
    for name, value in arguments.items():
        if value is None:
            raise wrong_type(name, "", "given", value)
        if name in _INTEGERS:
            _check_integer(name, value)
        elif name in _TEXTS:
            _check_text(name, value)
        elif name in _BYTES and not isinstance(value, bytes):
            raise wrong_type(name, "", "bytes, such as an array's tobytes()", value)
    return arguments


def named(cache: Any) -> Any:
    """Return the name of the cache that an operator means; it travels beside the request.

    Raises:
        InvalidError: it is no text.
    """
    if cache != "":  # as in all calls of workers
        given(cache=cache)
    return cache


def from_zero(num_tokens: Any) -> Any:
    """Return a number of tokens that may be 0, such as that of a commit or a trim.

    Raises:
        InvalidError: it is not a number, or out of range.
    """
    if isinstance(num_tokens, int) and num_tokens < 0:
        check_range("num_tokens", num_tokens, 0, TOKENS_MAX)
    if isinstance(num_tokens, float) or num_tokens != 0:
        given(num_tokens=num_tokens)
    return num_tokens


def _check_integer(name: str, value: Any) -> None:
    least, most = _INTEGERS[name]
    if isinstance(value, bool):
        raise wrong_type(name, "", "an integer", value)
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong_type(name, "", "an integer", value) from None
    if not least <= number <= most:
        check_range(name, number, least, most)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise wrong_type(name, "", "a string", value)
    if not value.isascii():
        check_encodable(name, value)


def _fields(*types: int) -> dict[str, int]:
    """Return the names of all fields of these types in any request, with their types; columns are checked elsewhere."""
    requests = (
        message
        for name, message in pb.DESCRIPTOR.message_types_by_name.items()
        if name.endswith("Request")
    )
    fields = (field for request in requests for field in request.fields)
    return {field.name: field.type for field in fields if field.type in types}


_INTEGERS: Final = {name: _BOUNDS[kind] for name, kind in _fields(*_BOUNDS).items()} | {
    "num_tokens": (1, TOKENS_MAX),
    "first_block": (0, TOKENS_MAX),
    "num_blocks": (0, TOKENS_MAX),
    "after_sequence": (0, SEQUENCE_MAX),
    "after_id": (0, ID_MAX),
    "retain_seconds": (0, SECONDS_RETAINED_MAX),
}
"""The least and the most of each integer field: what the field can carry, or less if the daemon takes less.

`num_tokens` must be at least 1 here; `from_zero` lets it be 0.
"""
_TEXTS: Final = frozenset(_fields(FieldDescriptor.TYPE_STRING))
_BYTES: Final = frozenset(_fields(FieldDescriptor.TYPE_BYTES))


def packed(column: ArrayLike, dtype: "np.dtype[Any]") -> bytes:
    """Pack a column; numbers that its type cannot carry are refused, not wrapped."""
    if isinstance(column, tuple) and not column:
        return b""  # as for most columns of an exchange: making an array would take longer than all the rest
    told = np.asarray(column)
    if told.dtype == dtype:
        return told.tobytes()
    if told.size and told.dtype.kind not in "iu":
        message = f"a column of {told.dtype} cannot be sent as {dtype}"
        raise InvalidError(message, resource="columns")
    bounds = np.iinfo(dtype)
    if told.size and (told.min() < bounds.min or told.max() > bounds.max):
        message = (
            f"a column with numbers from {told.min()} to {told.max()} does not fit into {dtype}"
        )
        raise InvalidError(message, resource="columns", limit=int(bounds.max))
    return told.astype(dtype).tobytes()
