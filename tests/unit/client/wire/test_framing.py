"""Laws of frames that are written by hand: protobuf reads in them what it would have written itself."""

import pytest
from google.protobuf.descriptor import FieldDescriptor

from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire import framing

NUMBERS = (0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**21, 2**32, 2**63)


def body_of(frame: bytes) -> bytes:
    """Return the message of a frame, and check that its length is the announced one."""
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    return frame[4:]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("part", list(pb.Call.DESCRIPTOR.oneofs_by_name["request"].fields))
def test_call_is_read_as_written(part: FieldDescriptor, number: int) -> None:
    """Every field of a call arrives, whatever its verb and number."""
    who = framing.caller_fields("token", 9, "demo")

    frame = framing.call_frame(part.name, b"", number, "key", who)

    fields = {part.name: part.message_type._concrete_class()}
    wanted = pb.Call(
        call_number=number, epoch=9, token="token", cache="demo", idempotency_key="key", **fields
    )
    assert pb.Call.FromString(body_of(frame)) == wanted


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("part", list(pb.Reply.DESCRIPTOR.oneofs_by_name["response"].fields))
def test_reply_is_read_as_written(part: FieldDescriptor, number: int) -> None:
    """Every field of a reply arrives, whatever its verb and number."""
    frame = framing.reply_frame(part.name, b"", number, 9)

    fields = {part.name: part.message_type._concrete_class()}
    wanted = pb.Reply(call_number=number, epoch=9, **fields)
    assert pb.Reply.FromString(body_of(frame)) == wanted


@pytest.mark.parametrize("num_bytes", [1, 127, 128, 2**14, 2**21])
def test_message_of_any_length_is_whole(num_bytes: int) -> None:
    """The announced length of the inner message is its real length."""
    keys = bytes(num_bytes)
    packed = pb.PinRequest(keys=keys).SerializeToString()

    frame = framing.call_frame("pin", packed, 1, "", framing.caller_fields("", 0, ""))

    assert pb.Call.FromString(body_of(frame)) == pb.Call(
        call_number=1, pin=pb.PinRequest(keys=keys)
    )
