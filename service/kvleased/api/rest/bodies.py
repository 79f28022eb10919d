"""Own the refusal of a wrong JSON body: it tells for each field what it is and what it must be, in the daemon's words.

The bounds are from the published schema; the daemon checks them for all transports alike, see `kvleased.calls.checks`.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ValidationError

from kvlease._checks import range_words, shown
from kvlease.errors import InvalidError
from kvleased.calls.checks import in_range, plain
from kvleased.counted import counted

ERRORS_MAX: Final = 16
"""Most fields that one refusal lists."""

Schema = Mapping[str, Any]

_WANTED: Final = {
    "bool_type": "true or false",
    "bytes_invalid_encoding": "base64",
    "bytes_type": "base64",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "text",
}
"""What a field must be, by pydantic's type of the fault."""


_AS_IT_IS: Final = frozenset({b"", b"identity"})
"""Values of Content-Encoding of a body that is not encoded."""
_OUT_OF_RANGE: Final = frozenset(
    {"finite_number", "greater_than", "greater_than_equal", "less_than_equal"}
)
"""The types of faults of a number that is not in its range."""


class FieldError(NamedTuple):
    """The fault of one field."""

    field: str
    """The field's place, such as reserves[0].num_tokens; empty for the body itself."""
    pointer: str
    """The place as a JSON Pointer in a URI fragment, as in RFC 9457."""
    detail: str
    need: int | None = None
    limit: int | None = None


class InvalidBodyError(InvalidError):
    """An argument is malformed or out of range."""

    def __init__(self, errors: tuple[FieldError, ...], num_errors: int) -> None:
        """Make a message of the first fault and the number of the others; `errors` has up to ERRORS_MAX of them."""
        first, rest = errors[0], num_errors - 1
        beside = f" ({rest} more, see errors)" if rest else ""
        super().__init__(
            f"{first.detail}{beside}",
            resource=first.field or "body",
            need=first.need,
            limit=first.limit,
        )
        self.errors = errors


class EncodedBodyError(InvalidError):
    """The body is encoded; send it as it is, without Content-Encoding."""

    http_status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE.value


def require_plain(encoding: bytes) -> None:
    """Refuse a body that its Content-Encoding calls compressed: a small one could grow to any size."""
    if encoding.strip().lower() not in _AS_IT_IS:
        said = shown(encoding.decode("latin-1"))
        message = f"the body's Content-Encoding is {said}; send the body without encoding it"
        raise EncodedBodyError(message, resource="content-encoding")


def refusal_of(body_class: type[BaseModel], error: ValidationError) -> InvalidBodyError:
    """Return the refusal of a body that pydantic found wrong."""
    # A union reports the faults of each of its types; the deepest are of the type that was meant.
    found: dict[tuple[str | int, ...], list[tuple[Any, Schema]]] = {}
    for one in error.errors(include_url=False):
        place, schema = _place(schema_of(body_class), one["loc"])
        found.setdefault(place, []).append((one, schema))
    deepest = [place for place in found if not any(_is_within(other, place) for other in found)]
    errors = tuple(_told(place, found[place]) for place in deepest[:ERRORS_MAX])
    return InvalidBodyError(errors, len(deepest))


@cache
def schema_of(body_class: type[BaseModel]) -> Schema:
    """Return the published schema of a body; making it takes long, so it is made once."""
    return body_class.model_json_schema()


def _is_within(place: tuple[str | int, ...], outer: tuple[str | int, ...]) -> bool:
    return len(place) > len(outer) > 0 and place[: len(outer)] == outer


def _place(root: Schema, loc: Iterable[str | int]) -> tuple[tuple[str | int, ...], Schema]:
    """Return the place of a fault, without pydantic's names for the types of a union, and the schema there."""
    place: list[str | int] = []
    at = _resolved(root, root)
    for part in loc:
        if isinstance(part, int):
            at = _resolved(root, at.get("items", {}))
        elif "properties" in at:
            at = _resolved(root, at["properties"].get(part, {"beside": list(at["properties"])}))
        else:
            kind = "string" if part == "bytes" else "array"
            at = next((one for one in at.get("anyOf", ()) if one.get("type") == kind), {})
            continue
        place.append(part)
    return tuple(place), at


def _resolved(root: Schema, schema: Schema) -> Schema:
    """Return the schema that a reference leads to, and of a type or null, the schema of the type."""
    kinds = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    if len(kinds) == 1:
        schema = {**kinds[0], **schema}
    name = schema.get("$ref", "").rpartition("/")[2]
    return root["$defs"][name] if name else schema


def _told(place: tuple[str | int, ...], faults: list[tuple[Any, Schema]]) -> FieldError:
    field = ""
    for part in place:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else part
    pointer = "#" + "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in place)
    name = field or "body"
    one, schema = faults[0]
    value = one["input"]
    if one["type"] in _OUT_OF_RANGE and isinstance(value, float | int) and "maximum" in schema:
        return _out_of_range(field, pointer, value, schema)
    wanted = [_WANTED[fault["type"]] for fault, _ in faults if fault["type"] in _WANTED]
    if wanted:
        words = f"{name} is {_shown(value)}; it must be {' or '.join(wanted)}"
        return FieldError(field, pointer, words)
    if one["type"] == "string_too_long":
        return FieldError(field, pointer, _too_long(name, value, schema), len(value), _most(schema))
    if one["type"] == "too_long":
        most = one["ctx"]["max_length"]
        words = f"{name} has {counted(len(value), 'item')}; the limit is {most}"
        return FieldError(field, pointer, words, len(value), most)
    return FieldError(field, pointer, _other_words(name, one, schema))


def _out_of_range(field: str, pointer: str, value: float, schema: Schema) -> FieldError:
    is_open = "exclusiveMinimum" in schema
    least, most = schema["exclusiveMinimum" if is_open else "minimum"], schema["maximum"]
    if schema.get("type") == "integer" and isinstance(value, int):
        wanted, limit = range_words(value, least, most)
        return FieldError(
            field, pointer, f"{field} is {plain(value)}; it must be {wanted}", value, limit
        )
    words = f"{field} is {plain(value)}; {in_range(least, most, is_open=is_open)}"
    return FieldError(field, pointer, words, limit=int(most))


def _other_words(name: str, one: Any, schema: Schema) -> str:
    if one["type"] == "extra_forbidden":
        near = get_close_matches(str(one["loc"][-1]), schema["beside"], 1)
        advice = f"did you mean {near[0]}?" if near else "leave it out"
        return f"{name[:80]} is not a field here; {advice}"
    if one["type"] == "json_invalid":
        return f"the body is not valid JSON: {one['ctx']['error']}; send a JSON object"
    return f"{name}: {one['msg']}"


def _too_long(name: str, value: str, schema: Schema) -> str:
    least = schema.get("minLength", 0)
    wanted = f"{least} to {_most(schema)}" if least else f"up to {_most(schema)}"
    printable = "" if value.isprintable() else ", some of them not printable"
    return f"{name} has {counted(len(value), 'character')}{printable}; it must have {wanted}, all printable"


def _most(schema: Schema) -> int:
    return int(schema.get("maxLength", 0))


def _shown(value: object) -> str:
    """Return a short text for a value; of an object or a list only the kind is told."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(shown(value))
