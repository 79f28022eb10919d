"""Laws of reading messages: only known fields are read, however they are written."""

import pytest

from kvlease.errors import InvalidError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api.messages import parse

STEP = pb.StepRequest(verbs=b"\1", reserves=[pb.ReserveRequest(request_id="r", num_tokens=3)])


def test_known_fields_are_read() -> None:
    """A message of the protocol is read as it was written."""
    assert parse(pb.StepRequest, STEP.SerializeToString()) == STEP


def test_other_spelling_of_known_fields_is_read() -> None:
    """A default that is written out, or a field written twice, is unusual but valid."""
    packed = b"\x0a\x01a\x0a\x01b\x18\x00"

    assert parse(pb.ReserveRequest, packed) == pb.ReserveRequest(request_id="b")


@pytest.mark.parametrize(
    ("packed", "where"),
    [
        pytest.param(b"\x78\x01", "StepRequest: field number 15", id="outside"),
        pytest.param(b"\x3a\x02\x78\x01", "StepRequest.reserves: field number 15", id="inside"),
        pytest.param(b"\x08\x01", "StepRequest: field number 1", id="another wire type"),
    ],
)
def test_unknown_field_is_named(packed: bytes, where: str) -> None:
    """A field that the protocol lacks is refused by its number, at any depth."""
    with pytest.raises(InvalidError, match=where):
        parse(pb.StepRequest, packed)


def test_garbage_is_refused() -> None:
    """Bytes that are no message are refused."""
    with pytest.raises(InvalidError, match="not a valid ReserveRequest"):
        parse(pb.ReserveRequest, b"\xff")
