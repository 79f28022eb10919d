"""Own the strict reading of protobuf messages: unknown fields are refused, not ignored."""

from typing import TypeVar

from google.protobuf import unknown_fields
from google.protobuf.message import DecodeError, Message

from kvlease.errors import InvalidError

M = TypeVar("M", bound=Message)


def parse(kind: type[M], packed: bytes) -> M:
    """Read a message.

    A field that `kind` does not have, or has with another wire type, is most likely a mistake of the caller; ignoring
    it would carry out something else than was asked for.

    Raises:
        InvalidError: the message is malformed or has unknown fields.
    """
    try:
        message = kind.FromString(packed)
    except DecodeError as error:
        raise InvalidError(
            f"this is not a valid {kind.DESCRIPTOR.name}: {error}", resource="message"
        ) from error
    # Nearly always the sizes are equal, which costs little to check and proves that no field was unknown.
    message.DiscardUnknownFields()
    if message.ByteSize() != len(packed):
        path = _unknown_field(kind.FromString(packed), kind.DESCRIPTOR.name)
        if path is not None:
            raise InvalidError(
                f"{path} is unknown or has the wrong type; use the field numbers and types of kvlease.v1",
                resource="message",
            )
    return message


def _unknown_field(message: Message, path: str) -> str | None:
    """Return the path of the first unknown field of a message; None if there is none."""
    unknown = unknown_fields.UnknownFieldSet(message)
    if len(unknown):
        return f"{path}: field number {unknown[0].field_number}"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            found = _unknown_field(part, f"{path}.{field.name}")
            if found is not None:
                return found
    return None
