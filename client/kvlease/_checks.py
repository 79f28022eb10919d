"""Own the check that a value from outside has the type and the range that its field declares.

How values relate to each other, and what they are called, is the business of the record that has the fields.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from reprlib import Repr
from types import NoneType
from typing import Any, Final, SupportsIndex, cast, get_args, get_origin, get_type_hints

from kvlease.errors import InvalidError
from kvlease.ids import BYTES_PER_KEY

_TEXT_CHARACTERS_MAX: Final = 256
"""Characters of a name, as every wire carries it."""
_SECONDS_MAX: Final = 1_000_000
"""Seconds of the longest wait, about 11 days; some of the timers below take no more than 24 days."""
_SHOWN_BITS_MAX: Final = 128
"""Bits of the largest integer that a refusal spells out."""
_SHOWN_CHARACTERS_MAX: Final = 40
_BYTES_PER_TOKEN_ID: Final = 4
_TOKEN_ID_MAX: Final = 2**31 - 1
_SIGN: Final = 0x80
_CARRIED_MOST: Final = frozenset({2**32 - 1, 2**53 - 1, 2**63 - 1, 2**64 - 1})
"""The largest integers that fields of the protocol carry, for each of their types."""
_LISTS: Final = (list, tuple)
_TYPES_OF_KEYS: Final = frozenset({bytes})
_LENGTHS_OF_KEYS: Final = frozenset({BYTES_PER_KEY})


def check_type(
    field: str,
    value: object,
    hint: Any,
    *,
    of: str = "",
    sequences: tuple[type, ...] = (tuple,),
) -> None:
    """Refuse a value that is not of the type `hint`: a class, a class or None, or a tuple of either.

    `of` says in the refusal whose field it is; `sequences` are the types that are taken for a tuple.

    Raises:
        InvalidError: rule wrong_type; the message names the field, the value and what is wanted.
    """
    inner = item_type(hint)
    if inner is None:
        if not _is_of(value, hint):
            raise wrong_type(field, of, _wanted(hint), value)
        return
    for index, item in enumerate(checked_items(field, value, inner, of=of, sequences=sequences)):
        check_type(f"{field}[{index}]", item, inner, of=of, sequences=sequences)


def checked_items(
    field: str,
    value: object,
    inner: Any,
    *,
    of: str = "",
    sequences: tuple[type, ...] = (tuple,),
) -> Iterable[object]:
    """Return the items of a field if its value is one of the `sequences`; a refusal says that they must be `inner`.

    Raises:
        InvalidError: rule wrong_type; the message names the field, the value and what is wanted.
    """
    if not isinstance(value, sequences):
        raise wrong_type(field, of, f"a {sequences[0].__name__} of {_several(inner)}", value)
    return cast("Iterable[object]", value)


def checked_integer(field: str, value: object) -> int:
    """Return a value of any integer type, NumPy's included, as an int.

    Raises:
        InvalidError: rule wrong_type; the message names the field and the value.
    """
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(cast("SupportsIndex", value))
    raise wrong_type(field, "", "an integer", value)


def check_range(field: str, value: int, least: int, most: int, *, of: str = "") -> None:
    """Refuse an integer that is not from `least` to `most`.

    Raises:
        InvalidError: rule out_of_range; the message names the field, the value and both bounds.
    """
    if least <= value <= most:
        return
    wanted, limit = range_words(value, least, most)
    message = f"{field}{of} must be {wanted}, not {shown(value)}"
    need = value if -(2**63) <= value < 2**63 else None
    raise InvalidError(message, resource=field, rule="out_of_range", need=need, limit=limit)


def range_words(value: float, least: int, most: int) -> tuple[str, int | None]:
    """Return words for the range that an integer is outside of, and the largest integer to name.

    If the integer is too small and `most` is only what the protocol's field can carry, `most` is not named: the
    daemon's own limit is lower.
    """
    if value < least and most in _CARRIED_MOST:
        return f"{least} or more", None
    return f"from {least} to {most}", most


def check_deadline(deadline_seconds: float) -> None:
    """Refuse a deadline that no call could honour."""
    check_type("deadline_seconds", deadline_seconds, int | float)
    _check_seconds("deadline_seconds", deadline_seconds, "")


def check_idle(idle_seconds: float | None) -> None:
    """Refuse a silence that no stream could wait for."""
    check_type("idle_seconds", idle_seconds, int | float | None)
    if idle_seconds is not None:
        _check_seconds("idle_seconds", idle_seconds, ", or None to wait forever")


def _check_seconds(field: str, seconds: float, instead: str) -> None:
    if not 0 < seconds <= _SECONDS_MAX:
        message = f"{field} must be a positive number, at most {_SECONDS_MAX}{instead}, not {shown(seconds)}"
        raise InvalidError(message, resource=field, limit=_SECONDS_MAX)


def check_token_ids(token_ids: bytes, num_tokens: int) -> None:
    """Refuse token ids, packed as int32, if one is negative or if there are more than the lease shall cover.

    Raises:
        InvalidError: rule negative_token or too_many_tokens; the message names the id, or both numbers.
    """
    # An id's sign is the highest bit of its last byte, and a byte with that bit is not ASCII.
    last_bytes = token_ids[_BYTES_PER_TOKEN_ID - 1 :: _BYTES_PER_TOKEN_ID]
    if not last_bytes.isascii():
        at = next(at for at, byte in enumerate(last_bytes) if byte >= _SIGN)
        start = at * _BYTES_PER_TOKEN_ID
        token = int.from_bytes(
            token_ids[start : start + _BYTES_PER_TOKEN_ID], "little", signed=True
        )
        message = f"token_ids[{at}] is {token}; a token id must be from 0 to {_TOKEN_ID_MAX}"
        raise InvalidError(
            message, resource="token_ids", rule="negative_token", limit=_TOKEN_ID_MAX
        )
    num_ids = len(token_ids) // _BYTES_PER_TOKEN_ID
    if num_ids > num_tokens:
        message = (
            f"token_ids has {num_ids} tokens, but num_tokens is {num_tokens}; "
            "send no more tokens than the lease is to cover"
        )
        raise InvalidError(
            message, resource="token_ids", rule="too_many_tokens", need=num_ids, limit=num_tokens
        )


def check_text(field: str, value: str, *, least: int = 0, of: str = "") -> None:
    """Refuse a text that a transport cannot carry or a terminal cannot show.

    Raises:
        InvalidError: rule bad_text; the message names the field, the value and what is allowed.
    """
    if least <= len(value) <= _TEXT_CHARACTERS_MAX and value.isprintable():
        return
    message = (
        f"{field}{of} must be {least} to {_TEXT_CHARACTERS_MAX} printable characters, "
        f"not {len(value)}: {shown(value)}"
    )
    raise InvalidError(
        message, resource=field, rule="bad_text", need=len(value), limit=_TEXT_CHARACTERS_MAX
    )


def wrong_type(field: str, of: str, wanted: str, value: object) -> InvalidError:
    """Return the refusal of a value that is not what is wanted."""
    message = f"{field}{of} must be {wanted}, not {shown(value)}"
    return InvalidError(message, resource=field, rule="wrong_type")


def check_keys(keys: object) -> None:
    """Refuse anything but a sequence of whole keys, such as packed keys, which other calls take.

    Raises:
        InvalidError: rule wrong_type or wrong_key; the message names the first item that is no key, and what is wanted.
    """
    if not isinstance(keys, _LISTS):
        is_packed = isinstance(keys, bytes | bytearray | memoryview)
        if is_packed or isinstance(keys, str) or not isinstance(keys, Sequence):
            advice = f"; split packed keys every {BYTES_PER_KEY} bytes" if is_packed else ""
            message = f"keys must be a list of {BYTES_PER_KEY}-byte keys, not {shown(keys)}{advice}"
            raise InvalidError(message, resource="keys", rule="wrong_type")
    # All keys at once, as nearly all are right and an engine makes this call for every request.
    if set(map(type, keys)) <= _TYPES_OF_KEYS and set(map(len, keys)) <= _LENGTHS_OF_KEYS:
        return
    for index, key in enumerate(keys):
        check_type(f"keys[{index}]", key, bytes)
        if len(key) != BYTES_PER_KEY:
            message = f"keys[{index}] has {len(key)} bytes; a key must have {BYTES_PER_KEY}"
            raise InvalidError(
                message, resource="keys", rule="wrong_key", need=BYTES_PER_KEY, available=len(key)
            )


def check_encodable(field: str, value: str) -> None:
    """Refuse a text that UTF-8 cannot encode; its length does not matter.

    Raises:
        InvalidError: rule bad_text; the message names the field and the first character that cannot be encoded.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = (
            f"{field} must be text that UTF-8 can encode; character {error.start} is "
            f"{shown(value[error.start])}"
        )
        raise InvalidError(message, resource=field, rule="bad_text") from error


def shown(value: object) -> str:
    """Return a value as a refusal shows it: its repr, shortened."""
    said: str = _SHORTENED.repr(value)
    return said


def _read_types(record_type: Any) -> dict[str, Any]:
    hints = get_type_hints(record_type)
    return {field.name: hints[field.name] for field in dataclasses.fields(record_type)}


field_types: Final[Callable[[Any], dict[str, Any]]] = cache(_read_types)
"""The fields of a record type with their types."""


class _Shortened(Repr):
    """Write any value in a short form; of an integer that is too long, give only the number of bits."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _SHOWN_CHARACTERS_MAX

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002  # what the library hands over
        """Return an integer's digits, or how many bits it has."""
        bits = x.bit_length()
        return str(x) if bits <= _SHOWN_BITS_MAX else f"an integer of {bits} bits"


_SHORTENED: Final = _Shortened()

_ONE: Final = {int: "an integer", str: "a string", bool: "true or false", bytes: "bytes"}
_SEVERAL: Final = {int: "integers", str: "strings"}


@cache
def item_type(hint: Any) -> Any:
    """Return the type of a tuple's items; None if the hint is not a tuple."""
    return get_args(hint)[0] if get_origin(hint) is tuple else None


@cache
def _kinds(hint: Any) -> tuple[type, ...]:
    return get_args(hint) or (hint,)


def _is_of(value: object, hint: Any) -> bool:
    """Tell whether a value is of a type or of one of several; True and False do not count as integers."""
    kinds = _kinds(hint)
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _wanted(hint: Any) -> str:
    kinds = _kinds(hint)
    said = " or ".join(
        _ONE.get(kind, f"a {kind.__name__}") for kind in kinds if kind is not NoneType
    )
    return f"{said}, or left out" if NoneType in kinds else said


def _several(hint: Any) -> str:
    inner = item_type(hint)
    if inner is not None:
        return f"lists of {_several(inner)}"
    return _SEVERAL.get(hint) or str(hint.__name__)


def check_alone(**others: object) -> None:
    """Refuse other arguments beside a lease, as the lease already says which blocks are meant.

    Raises:
        InvalidError: another argument is given; the message names it.
    """
    for name, value in others.items():
        if not isinstance(value, bytes | int) or value:
            message = f"{name} is given together with a lease; pass only one of them"
            raise InvalidError(message, resource=name)
