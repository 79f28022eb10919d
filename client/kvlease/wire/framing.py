"""Own the frames of the local socket as bytes: a Call or Reply written by hand around a message that is packed already.

If protobuf built the outer message, it would copy the inner one and pack it twice. Reading is left to protobuf.
"""

import struct
from functools import lru_cache
from typing import Final

from kvlease.v1 import kvlease_pb2 as pb

LENGTH: Final = struct.Struct("<I")
"""The length before the message of a frame; reading it takes a third of the time of `int.from_bytes`."""
BYTES_OF_LENGTH: Final = LENGTH.size
GRPC_SLACK_BYTES: Final = 7 << 20
"""Bytes above the limit that a daemon still reads of a gRPC message, so that its own refusal can name the limit.

If a message is even larger, gRPC refuses it and names its own limit; a client subtracts these bytes from that.
"""

_WIRE_VARINT: Final = 0
_WIRE_BYTES: Final = 2


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it: seven bits a byte, lowest bits first, every byte but the last marked."""
    if number < 1 << 7:
        return _LAST[number]
    if number < 1 << 14:
        return _MORE[number & 127] + _LAST[number >> 7]
    return _MORE[number & 127] + varint(number >> 7)


def call_frame(verb: str, packed: bytes, call_number: int, key: str, who: bytes) -> bytes:
    """Return the frame of a call: its packed request, its idempotency key, and what `caller_fields` returned."""
    key_bytes = key.encode()
    key_head, request_head = _key_head(len(key_bytes)), _request_head(verb, len(packed))
    number = varint(call_number)
    body = b"".join((_CALL_NUMBER, number, who, key_head, key_bytes, request_head, packed))
    return LENGTH.pack(len(body)) + body


@lru_cache(maxsize=64)
def caller_fields(token: str, epoch: int, cache: str) -> bytes:
    """Return the fields of a Call that stay the same from call to call."""
    return pb.Call(epoch=epoch, token=token, cache=cache).SerializeToString()


def traceparent_field(traceparent: str) -> bytes:
    """Return the field of a Call that names the span in which the call is made."""
    return pb.Call(traceparent=traceparent).SerializeToString()


def reply_frame(verb: str, packed: bytes, call_number: int, epoch: int) -> bytes:
    """Return the frame that answers a call with the packed response of its verb."""
    number, response_head = varint(call_number), _response_head(verb, len(packed))
    body = b"".join((_CALL_NUMBER, number, _epoch_field(epoch), response_head, packed))
    return LENGTH.pack(len(body)) + body


@lru_cache(maxsize=256)
def _key_head(num_bytes: int) -> bytes:
    """Return the tag and length before an idempotency key; nothing if there is no key."""
    return _KEY + varint(num_bytes) if num_bytes else b""


@lru_cache(maxsize=1024)
def _request_head(verb: str, num_bytes: int) -> bytes:
    return _REQUEST_TAGS[verb] + varint(num_bytes)


@lru_cache(maxsize=1024)
def _response_head(verb: str, num_bytes: int) -> bytes:
    return _RESPONSE_TAGS[verb] + varint(num_bytes)


@lru_cache(maxsize=8)
def _epoch_field(epoch: int) -> bytes:
    return pb.Reply(epoch=epoch).SerializeToString()


_LAST: Final = tuple(bytes((low,)) for low in range(128))
_MORE: Final = tuple(bytes((low | 128,)) for low in range(128))


def _tags(message: type[pb.Call | pb.Reply], oneof: str) -> dict[str, bytes]:
    fields = message.DESCRIPTOR.oneofs_by_name[oneof].fields
    return {field.name: varint(field.number << 3 | _WIRE_BYTES) for field in fields}


_CALL_NUMBER: Final = varint(pb.Call.CALL_NUMBER_FIELD_NUMBER << 3 | _WIRE_VARINT)
_KEY: Final = varint(pb.Call.IDEMPOTENCY_KEY_FIELD_NUMBER << 3 | _WIRE_BYTES)
_REQUEST_TAGS: Final = _tags(pb.Call, "request")
_RESPONSE_TAGS: Final = _tags(pb.Reply, "response")
assert pb.Reply.CALL_NUMBER_FIELD_NUMBER == pb.Call.CALL_NUMBER_FIELD_NUMBER, "one tag for both"
