"""Forks and trims with a real daemon and memory: shared blocks are the same bytes, copied blocks equal ones."""

import base64
import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from kvlease import AsyncClient, Client, FullAttention, PlanInputs, Worker
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc
from tests.acceptance.serving import Serving, blocks_in_use, new_cache, pool_of

pytestmark = pytest.mark.acceptance

LAYER = FullAttention(name="0", num_kv_heads=2, head_size=64, dtype="float32")
INPUTS = PlanInputs(layers=(LAYER,), tokens_per_block=16, device_blocks=32, host_bytes=1 << 20)
TOKENS = list(range(56))
NUM_WRITTEN = 40
"""Two full blocks and a half."""

Ids = NDArray[np.int32]


@pytest.fixture
def mapped(daemon: Serving) -> Iterator[Worker]:
    """Attach a worker to a new cache, with its memory mapped."""
    with new_cache(daemon, "forks", INPUTS) as client, client.attach("forks") as worker:
        yield worker


# Three ways to speak --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """A lease as any of the three transports describes it."""

    lease_id: int
    block_ids: Ids


class Speaker(Protocol):
    """Whoever reserves, commits, forks, trims and releases."""

    def reserve(self, num_tokens: int) -> Granted:
        """Reserve blocks."""

    def commit(self, lease_id: int, num_tokens: int, keys: bytes) -> None:
        """Commit written blocks."""

    def fork(self, lease_id: int, num_tokens: int) -> Granted:
        """Fork a lease."""

    def trim(self, lease_id: int, num_tokens: int) -> int:
        """Trim a lease; returns how many blocks left it."""

    def release(self, lease_id: int) -> None:
        """Release a lease."""


class ByClient:
    """The blocking client."""

    def __init__(self, worker: Worker, _: Path) -> None:
        self._worker = worker
        self._leases: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def reserve(self, num_tokens: int) -> Granted:
        """Reserve blocks."""
        return self._granted(self._worker.reserve("parent", num_tokens=num_tokens))

    def commit(self, lease_id: int, num_tokens: int, keys: bytes) -> None:
        """Commit written blocks."""
        self._leases[lease_id].commit(num_tokens, keys)

    def fork(self, lease_id: int, num_tokens: int) -> Granted:
        """Fork a lease."""
        return self._granted(self._leases[lease_id].fork("child", num_tokens))

    def trim(self, lease_id: int, num_tokens: int) -> int:
        """Trim a lease."""
        num_given_back: int = self._leases[lease_id].trim(num_tokens)
        return num_given_back

    def release(self, lease_id: int) -> None:
        """Release a lease."""
        self._leases[lease_id].release()

    def _granted(self, lease: Any) -> Granted:
        self._leases[lease.lease_id] = lease
        return Granted(lease_id=lease.lease_id, block_ids=lease.block_ids)


class ByRest:
    """JSON over HTTP, written by hand."""

    def __init__(self, _: Worker, runtime_dir: Path) -> None:
        self._http = http.client.HTTPConnection("localhost", timeout=20)
        self._http.sock = socket.socket(socket.AF_UNIX)
        self._http.sock.connect(str(runtime_dir / "http.sock"))
        self._headers = {"Content-Type": "application/json"}
        attached = self._ask("POST", "/v1/caches/forks/workers", {})
        self._headers["Authorization"] = f"Bearer {attached['token']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ask("DELETE", "/v1/workers/self")
        self._http.close()

    def reserve(self, num_tokens: int) -> Granted:
        """Reserve blocks."""
        body = {"request_id": "parent", "num_tokens": num_tokens}
        return self._granted(self._ask("POST", "/v1/leases", body))

    def commit(self, lease_id: int, num_tokens: int, keys: bytes) -> None:
        """Commit written blocks."""
        body = {"num_tokens": num_tokens, "keys": base64.b64encode(keys).decode()}
        self._ask("POST", f"/v1/leases/{lease_id}/commit", body)

    def fork(self, lease_id: int, num_tokens: int) -> Granted:
        """Fork a lease."""
        body = {"request_id": "child", "num_tokens": num_tokens}
        answer = self._ask("POST", f"/v1/leases/{lease_id}/fork", body)
        assert (answer["num_shared"], answer["num_copied"]) == (2, 1)
        return self._granted(answer["lease"])

    def trim(self, lease_id: int, num_tokens: int) -> int:
        """Trim a lease."""
        answer = self._ask("POST", f"/v1/leases/{lease_id}/trim", {"num_tokens": num_tokens})
        return int(answer["num_given_back"])

    def release(self, lease_id: int) -> None:
        """Release a lease."""
        self._ask("DELETE", f"/v1/leases/{lease_id}")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        self._http.request(method, path, None if body is None else json.dumps(body), self._headers)
        response = self._http.getresponse()
        answer: dict[str, Any] = json.loads(response.read() or b"{}")
        assert response.status < 300, answer
        return answer

    @staticmethod
    def _granted(lease: dict[str, Any]) -> Granted:
        block_ids = np.frombuffer(base64.b64decode(lease["block_ids"]), np.int32)
        return Granted(lease_id=lease["lease_id"], block_ids=block_ids)


class ByGrpc:
    """Stubs as they are generated."""

    def __init__(self, _: Worker, runtime_dir: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{runtime_dir}/grpc.sock")
        self._stub: Any = kvlease_pb2_grpc.KVLeaseServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        attached = self._stub.Attach(pb.AttachRequest(cache="forks"), timeout=20)
        self._who = {
            "timeout": 20,
            "metadata": (("authorization", f"Bearer {attached.token}"),),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stub.Detach(pb.DetachRequest(), **self._who)
        self._channel.close()

    def reserve(self, num_tokens: int) -> Granted:
        """Reserve blocks."""
        request = pb.ReserveRequest(request_id="parent", num_tokens=num_tokens)
        return self._granted(self._stub.Reserve(request, **self._who))

    def commit(self, lease_id: int, num_tokens: int, keys: bytes) -> None:
        """Commit written blocks."""
        request = pb.CommitRequest(lease_id=lease_id, num_tokens=num_tokens, keys=keys)
        self._stub.Commit(request, **self._who)

    def fork(self, lease_id: int, num_tokens: int) -> Granted:
        """Fork a lease."""
        request = pb.ForkRequest(lease_id=lease_id, request_id="child", num_tokens=num_tokens)
        forked = self._stub.Fork(request, **self._who)
        assert (forked.num_shared, forked.num_copied) == (2, 1)
        return self._granted(forked.lease)

    def trim(self, lease_id: int, num_tokens: int) -> int:
        """Trim a lease."""
        request = pb.TrimRequest(lease_id=lease_id, num_tokens=num_tokens)
        return int(self._stub.Trim(request, **self._who).num_given_back)

    def release(self, lease_id: int) -> None:
        """Release a lease."""
        self._stub.Release(pb.ReleaseRequest(lease_id=lease_id), **self._who)

    @staticmethod
    def _granted(lease: Any) -> Granted:
        block_ids = np.frombuffer(lease.block_ids, np.int32)
        return Granted(lease_id=lease.lease_id, block_ids=block_ids)


@pytest.fixture(
    params=[
        pytest.param(ByClient, id="client"),
        pytest.param(ByRest, id="rest"),
        pytest.param(ByGrpc, id="grpc"),
    ]
)
def speaker(request: pytest.FixtureRequest, daemon: Serving, mapped: Worker) -> Iterator[Speaker]:
    """Give a speaker of each of the three kinds."""
    with request.param(mapped, daemon.runtime_dir) as speaker:
        yield speaker


def written(mapped: Worker, speaker: Speaker) -> Granted:
    """Return a lease with two and a half blocks written, of which the two full ones are committed."""
    parent = speaker.reserve(num_tokens=48)
    pool = pool_of(mapped)
    random = np.random.default_rng(1)
    pool[parent.block_ids] = random.integers(1, 256, (3, pool.shape[1]), np.uint8)
    keys = mapped.keys.chain(TOKENS[:NUM_WRITTEN], 16)
    speaker.commit(parent.lease_id, NUM_WRITTEN, keys)
    return parent


# Laws -----------------------------------------------------------------------------------------------------------------


def test_child_reads_what_its_parent_wrote(mapped: Worker, speaker: Speaker) -> None:
    """The child has the same committed blocks, another block with a copy of the half one's bytes, and new ones."""
    parent = written(mapped, speaker)
    pool = pool_of(mapped)

    child = speaker.fork(parent.lease_id, num_tokens=56)

    assert child.block_ids[:2].tolist() == parent.block_ids[:2].tolist()
    assert len({*parent.block_ids.tolist(), *child.block_ids.tolist()}) == 3 + 2
    assert (pool[child.block_ids[:3]] == pool[parent.block_ids]).all()


def test_what_a_child_writes_its_parent_does_not_read(mapped: Worker, speaker: Speaker) -> None:
    """Each goes on in its own half block, and the end of one leaves the other's bytes alone."""
    parent = written(mapped, speaker)
    pool = pool_of(mapped)
    before = pool[parent.block_ids].copy()
    child = speaker.fork(parent.lease_id, num_tokens=56)

    pool[child.block_ids[2:]] = 0xEE
    keys = mapped.keys.chain([*TOKENS[:NUM_WRITTEN], *range(900, 916)], 16)
    speaker.commit(child.lease_id, 56, keys)

    assert (pool[parent.block_ids] == before).all()
    assert mapped.lookup(mapped.keys.chain(TOKENS, 16)).hit_tokens == 32
    speaker.release(parent.lease_id)
    assert (pool[child.block_ids[:2]] == before[:2]).all()
    assert (pool[child.block_ids[2:]] == 0xEE).all()


def test_rejected_drafts_give_their_blocks_back(
    daemon: Serving, mapped: Worker, speaker: Speaker
) -> None:
    """A lease with lookahead is trimmed to the accepted tokens, and its remaining blocks stay where they are."""
    parent = written(mapped, speaker)
    child = speaker.fork(parent.lease_id, num_tokens=NUM_WRITTEN + 40)

    num_given_back = speaker.trim(child.lease_id, NUM_WRITTEN + 3)

    assert (len(child.block_ids), num_given_back) == (5, 2)
    with Client(daemon.address("unix")) as client:
        assert blocks_in_use(client, "forks") == 3 + 1
    pool = pool_of(mapped)
    assert (pool[child.block_ids[:3]] == pool[parent.block_ids]).all()


def test_lookahead_that_is_trimmed_can_be_taken_again(mapped: Worker) -> None:
    """A lease that looks ahead and is trimmed at each step never has more blocks than its tokens and drafts need."""
    lease = mapped.reserve("drafting", num_tokens=NUM_WRITTEN)
    for num_tokens in range(NUM_WRITTEN, 120, 5):
        lease.extend(num_tokens + 24)
        lease.commit(num_tokens, b"")
        lease.trim(num_tokens + 3)

        assert len(lease.block_ids) == -(-(num_tokens + 3) // 16)
        assert lease.covered_tokens >= num_tokens + 3


def test_fork_outlives_the_control_process(daemon: Serving, mapped: Worker) -> None:
    """Parent and child keep their blocks, shared and copied, over a SIGKILL of the process that decided."""
    speaker = ByClient(mapped, daemon.runtime_dir)
    parent = speaker.reserve(num_tokens=48)
    pool = pool_of(mapped)
    pool[parent.block_ids] = np.arange(1, 4, dtype=np.uint8)[:, None]
    speaker.commit(parent.lease_id, NUM_WRITTEN, mapped.keys.chain(TOKENS[:NUM_WRITTEN], 16))
    child = speaker.fork(parent.lease_id, num_tokens=56)

    daemon.restart_control(mapped)
    speaker.release(parent.lease_id)
    pool[speaker.reserve(num_tokens=64).block_ids] = 0xEE

    assert (pool[child.block_ids[:3]] == np.arange(1, 4, dtype=np.uint8)[:, None]).all()
    assert mapped.num_leases == 2


async def test_async_client_forks_and_trims(daemon: Serving, mapped: Worker) -> None:
    """On an event loop a fork is shared, copied and trimmed alike, and released at the end of its `with` block."""
    async with (
        AsyncClient(daemon.address("unix"), on_doubt="raise") as client,
        await client.attach("forks") as worker,
        await worker.reserve("parent", num_tokens=48) as parent,
    ):
        pool_of(mapped)[parent.block_ids] = np.arange(1, 4, dtype=np.uint8)[:, None]
        await parent.commit(NUM_WRITTEN, worker.keys.chain(TOKENS[:NUM_WRITTEN], 16))

        async with await parent.fork("child", 80) as child:
            num_given_back = await child.trim(50)

            assert (len(child.block_ids), num_given_back) == (4, 1)
            assert child.block_ids[:2].tolist() == parent.block_ids[:2].tolist()
            assert (pool_of(mapped)[child.block_ids[2]] == 3).all()
