"""Own the JSON form of responses and its schema: fields by protocol name, defaults included, bytes as base64."""

import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

Json = dict[str, Any]
"""A JSON object; `Any`, because it is the wire."""

_Writer = Callable[[Any], Any]

_INTEGERS: Final = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_ENUM,
}
_FLOATS: Final = {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}

_encode: Final = json.JSONEncoder(separators=(",", ":")).encode


def to_json(message: Message) -> bytes:
    """Return a message as a JSON object."""
    return _encode(to_fields(message)).encode()


def to_fields(message: Message) -> Json:
    """Return the fields of a message; those of a oneof, and optional ones, only if they are set."""
    plain, written, optional = _plan(message.DESCRIPTOR)
    fields = {name: getattr(message, name) for name in plain}
    for name, write in written:
        fields[name] = write(getattr(message, name))
    for name, write in optional:
        if message.HasField(name):
            fields[name] = write(getattr(message, name))
    return fields


def schema(descriptor: Descriptor) -> Json:
    """Return the JSON schema of a message, nested ones by reference to `#/components/schemas`."""
    properties = {field.name: _field_schema(field) for field in descriptor.fields}
    required = [field.name for field in descriptor.fields if not field.has_presence]
    return {
        "type": "object",
        "title": descriptor.name,
        "properties": properties,
        **({"required": required} if required else {}),
    }


def schemas_of(descriptor: Descriptor) -> Mapping[str, Json]:
    """Return the schemas of a message and of every message in it, by name."""
    found = {descriptor.name: schema(descriptor)}
    for field in descriptor.fields:
        if field.message_type is not None and not _is_map(field):
            found.update(schemas_of(field.message_type))
    return found


@cache
def _plan(
    descriptor: Descriptor,
) -> tuple[tuple[str, ...], tuple[tuple[str, _Writer], ...], tuple[tuple[str, _Writer], ...]]:
    """Sort the fields into those to copy, those that need a writer, and those that may be unset."""
    plain: list[str] = []
    written: list[tuple[str, _Writer]] = []
    optional: list[tuple[str, _Writer]] = []
    for field in descriptor.fields:
        write = _writer(field)
        if field.has_presence:
            optional.append((field.name, write))
        elif write is _same:
            plain.append(field.name)
        else:
            written.append((field.name, write))
    return tuple(plain), tuple(written), tuple(optional)


def _writer(field: FieldDescriptor) -> _Writer:
    if _is_map(field):
        return dict
    if field.message_type is not None:
        return _fields_of_each if field.is_repeated else to_fields
    if field.is_repeated:
        return list
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _base64
    return _same


def _same(value: Any) -> Any:
    return value


def _base64(value: bytes) -> str:
    return b64encode(value).decode("ascii")


def _fields_of_each(messages: Any) -> list[Json]:
    return [to_fields(message) for message in messages]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _field_schema(field: FieldDescriptor) -> Json:
    if _is_map(field):
        assert field.message_type is not None, "a map's entry is a message"
        return {
            "type": "object",
            "additionalProperties": _scalar_schema(field.message_type.fields_by_name["value"]),
        }
    if field.message_type is None:
        item = _scalar_schema(field)
    else:
        item = {"$ref": f"#/components/schemas/{field.message_type.name}"}
    return {"type": "array", "items": item} if field.is_repeated else item


def _scalar_schema(field: FieldDescriptor) -> Json:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return {"type": "string", "contentEncoding": "base64"}
    if field.cpp_type in _INTEGERS:
        return {"type": "integer"}
    if field.cpp_type in _FLOATS:
        return {"type": "number"}
    return {"type": "boolean" if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL else "string"}
