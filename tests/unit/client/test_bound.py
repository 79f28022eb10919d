"""Laws of what belongs to one process: it is neither pickled nor copied, and says what to do instead."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message

from kvlease import AsyncClient, Client, InvalidError
from kvlease._calling import calls
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.frame_server import FrameServer, Regions


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Give the address of a daemon that grants one lease."""
    with Regions() as regions:

        def answer(call: pb.Call) -> Message:
            verb = call.WhichOneof("request")
            if verb == "attach":
                return regions.attached()
            if verb == "reserve":
                return pb.ReserveResponse(lease_id=11, block_ids=bytes(4))
            return pb.ReleaseResponse() if verb == "release" else pb.DetachResponse()

        with FrameServer(path=tmp_path / "s", answer=answer, fds=regions.fds) as server:
            yield f"unix://{server.path}"


@pytest.mark.parametrize(
    "taken",
    [
        pytest.param(pickle.dumps, id="pickle"),
        pytest.param(copy.copy, id="copy"),
        pytest.param(copy.deepcopy, id="deepcopy"),
    ],
)
def test_what_belongs_to_a_process_is_not_taken_elsewhere(
    address: str, taken: Callable[[object], object]
) -> None:
    """A client, a worker and what it has refuse by name, and say to open a client in each process."""
    with Client(address) as client, client.attach("c", magazine="m") as worker:
        lease = worker.reserve("r", num_tokens=4)

        mine = (client, AsyncClient(address), worker, worker.magazine(), worker.tables, lease)
        for one in mine:
            with pytest.raises(
                TypeError, match=f"{type(one).__name__} can neither .* each process"
            ):
                taken(one)


def test_request_id_of_bytes_is_refused() -> None:
    """A request id is text; protobuf alone would take bytes, and the lease would then have them as its name."""
    with pytest.raises(InvalidError, match="request_id must be a string"):
        calls.reserve(request_id=b"r", num_tokens=4)  # type: ignore[arg-type]  # the mistake
