"""Laws of the JSON form: the library reads what the daemon writes, and the schema describes it."""

import json

import pytest
from google.protobuf.message import Message

from kvlease.transports import _rest
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api.rest.conversion import schema, to_json

MESSAGES = [
    pb.ReserveResponse(lease_id=2**52, block_ids=b"\0\1", row=3),
    pb.StepResponse(codes=b"\0", reserves=[
        pb.StepReserve(granted=pb.ReserveResponse(lease_id=1)), pb.StepReserve(error=pb.Error(code="X", need=0)),
    ]),
    pb.StatsResponse(epoch=7, caches=[
        pb.CacheStats(cache="c", counters={"evictions": 3}, pools=[pb.PoolStats(free=1)]),
    ]),
    pb.AttachResponse(
        token="t", heartbeat_seconds=0.5, info=pb.CacheInfo(cache="c"), regions=[pb.Region(read_only=True)],
    ),
    pb.DetachResponse(),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.DESCRIPTOR.name)
def test_library_reads_what_the_daemon_writes(message: Message) -> None:
    """JSON is another form of the message and loses nothing."""
    found = type(message)()

    _rest.fill(found, json.loads(to_json(message)))

    assert found == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.DESCRIPTOR.name)
def test_schema_names_what_is_written(message: Message) -> None:
    """Every field that is written is described, and every required field is written."""
    described = schema(message.DESCRIPTOR)
    written = json.loads(to_json(message)).keys()

    assert set(described.get("required", ())) <= written <= described["properties"].keys()
