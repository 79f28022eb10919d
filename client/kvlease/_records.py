"""Own the conversion between frozen records and messages of the protocol whose fields have the same names."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvlease._checks import (
    check_encodable,
    check_range,
    check_type,
    checked_items,
    field_types,
    item_type,
)
from kvlease.spec import LayerSpec, spec_from_fields, spec_to_fields
from kvlease.units import BYTES_MAX

MessageT = TypeVar("MessageT", bound=Message)
RecordT = TypeVar("RecordT")


def check_record(record: object, declared: Any, path: str = "") -> None:
    """Refuse a record with a field that is not of its declared type, or out of the message's range.

    Layers in the record are checked field by field, too. A list may stand for a declared tuple. `declared` is the
    message's descriptor, and `path` is the record's place in its parent, such as ranks[0].

    Raises:
        InvalidError: the message names the field with its path, the value and what is wanted.
    """
    prefix = f"{path}." if path else ""
    for name, hint in field_types(type(record)).items():
        _check(prefix + name, getattr(record, name), hint, declared.fields_by_name[name])


def to_proto(record: object, message_type: type[MessageT]) -> MessageT:
    """Return the message whose fields are those of a record; nested records become nested messages."""
    message = message_type()
    for name in field_types(type(record)):
        _put(message, name, getattr(record, name))
    return message


def from_proto(message: Message, record_type: type[RecordT]) -> RecordT:
    """Return the record whose fields are those of a message; a nested message that is absent becomes the default.

    Raises:
        InvalidError: the fields of a layer in it do not describe a layer.
    """
    values: dict[str, Any] = {}
    for name, hint in field_types(record_type).items():
        if _is_absent(message, name, hint):
            continue
        values[name] = _take(getattr(message, name), hint)
    return record_type(**values)


def _check(field: str, value: Any, hint: Any, declared: Any) -> None:
    inner = item_type(hint)
    if inner is not None:
        for index, item in enumerate(checked_items(field, value, inner, sequences=(tuple, list))):
            _check(f"{field}[{index}]", item, inner, declared)
        return
    check_type(field, value, hint)
    if isinstance(value, LayerSpec):
        value.check_fields(field)
    elif dataclasses.is_dataclass(value):
        check_record(value, declared.message_type, field)
    elif isinstance(value, str):
        check_encodable(field, value)
    elif declared.cpp_type in _MOST:
        check_range(field, value or 0, 0, _MOST[declared.cpp_type])


_MOST: Final = {
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_UINT64: BYTES_MAX,
}
"""The largest count that a field takes; a 64-bit count may have no more than the 53 bits that JSON carries."""


def _put(message: Message, name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, LayerSpec):
        _put_spec(getattr(message, name), value)
    elif dataclasses.is_dataclass(value):
        target = getattr(message, name)
        target.SetInParent()
        for inner in field_types(type(value)):
            _put(target, inner, getattr(value, inner))
    elif isinstance(value, tuple | list):
        for item in value:
            _add(getattr(message, name), item)
    else:
        setattr(message, name, value)


def _add(repeated: Any, item: Any) -> None:
    if isinstance(item, LayerSpec):
        _put_spec(repeated.add(), item)
    elif dataclasses.is_dataclass(item):
        target = repeated.add()
        for inner in field_types(type(item)):
            _put(target, inner, getattr(item, inner))
    else:
        repeated.append(item)


def _put_spec(message: Any, spec: LayerSpec) -> None:
    message.SetInParent()
    for name, value in spec_to_fields(spec).items():
        if name == "shapes":
            for shape in value:
                message.shapes.add().extents.extend(shape)
        elif name == "dtypes":
            message.dtypes.extend(value)
        else:
            setattr(message, name, value)


def _take(value: Any, hint: Any) -> Any:
    """Return the value of a message's field, converted to the record's type hint."""
    inner = item_type(hint)
    if inner is not None:
        return tuple(_take(item, inner) for item in value)
    if hint is LayerSpec:
        return spec_from_fields(_fields_of(value))
    if dataclasses.is_dataclass(hint):
        return from_proto(value, hint)  # type: ignore[arg-type]  # a record's type, not a record
    return hint(value) if isinstance(hint, type) else value


def _fields_of(message: Any) -> Mapping[str, Any]:
    """Return the fields that are set in a layer's message."""
    given = {field.name: value for field, value in message.ListFields()}
    if "shapes" in given:
        given["shapes"] = tuple(tuple(shape.extents) for shape in given["shapes"])
    if "dtypes" in given:
        given["dtypes"] = tuple(given["dtypes"])
    return given


def _is_absent(message: Message, name: str, hint: Any) -> bool:
    """Tell whether an optional field or a nested record is absent, so that it has its default."""
    field = message.DESCRIPTOR.fields_by_name[name]
    return field.has_presence and not message.HasField(name) and hint is not LayerSpec
