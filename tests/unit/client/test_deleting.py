"""Laws of deleting: a refused delete leaves a client as it was, so that its workers still register their cache anew."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message

from kvlease import (
    AsyncClient,
    CacheInUseError,
    Client,
    InvalidError,
    KVLeaseError,
    PlanInputs,
    UnknownCacheError,
)
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.frame_server import FrameServer, Regions

INPUTS = PlanInputs(model_config="{}", tokens_per_block=16, device_blocks=8)


class Daemon:
    """A daemon of one cache; `refusal` is its answer to a delete."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.refusal: KVLeaseError | None = None
        self.is_registered = False

    def __call__(self, call: pb.Call) -> Message:
        """Answer a call."""
        verb = call.WhichOneof("request")
        if verb == "register_cache":
            self.is_registered = True
            info = self.regions.attached().info
            return pb.RegisterCacheResponse(created=True, info=info)
        if verb == "delete_cache":
            if self.refusal is not None:
                raise self.refusal
            return pb.DeleteCacheResponse()
        if not self.is_registered:
            raise UnknownCacheError
        if verb == "attach":
            return self.regions.attached()
        return pb.LookupResponse() if verb == "lookup" else pb.DetachResponse()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Give the answers of a daemon."""
    with Regions() as regions:
        yield Daemon(regions)


@pytest.fixture
def address(tmp_path: Path, daemon: Daemon) -> Iterator[str]:
    """Give the daemon's address."""
    with FrameServer(path=tmp_path / "s", answer=daemon, fds=daemon.regions.fds) as server:
        yield f"unix://{server.path}"


@pytest.mark.parametrize(
    ("refusal", "is_kept"),
    [
        pytest.param(CacheInUseError("1 worker is attached"), True, id="refused"),
        pytest.param(UnknownCacheError(), False, id="gone"),
        pytest.param(None, False, id="deleted"),
    ],
)
async def test_refused_delete_keeps_the_registration(
    address: str, daemon: Daemon, refusal: KVLeaseError | None, *, is_kept: bool
) -> None:
    """Workers that attach later can register the cache again, unless it was deleted."""
    daemon.refusal = refusal

    with Client(address) as client:
        client.register("demo", INPUTS)
        try:
            client.delete_cache("demo")
        except KVLeaseError as error:
            assert error.code == getattr(refusal, "code", None)
        with client.attach("demo") as worker:
            assert (worker._session.registration is not None) is is_kept
    async with AsyncClient(address) as other:
        await other.register("demo", INPUTS)
        try:
            await other.delete_cache("demo")
        except KVLeaseError as error:
            assert error.code == getattr(refusal, "code", None)
        async with await other.attach("demo") as another:
            assert (another._session.registration is not None) is is_kept


@pytest.mark.parametrize("cache", [["demo"], None, b"demo"])
async def test_name_that_is_no_text_is_refused_before_a_delete(address: str, cache: object) -> None:
    """What cannot be the name of a cache is refused by name."""
    with Client(address) as client:
        client.register("demo", INPUTS)
        with pytest.raises(InvalidError, match="cache must be"):
            client.delete_cache(cache)  # type: ignore[arg-type]  # the mistake
    async with AsyncClient(address) as other:
        await other.register("demo", INPUTS)
        with pytest.raises(InvalidError, match="cache must be"):
            await other.delete_cache(cache)  # type: ignore[arg-type]  # the mistake
