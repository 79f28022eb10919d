"""Laws of workers and their memory, blocking and asynchronous, over real sockets and real shared memory."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from kvlease import (
    AsyncClient,
    AsyncLease,
    Client,
    DeadlineError,
    InvalidError,
    KVLeaseError,
    PlanInputs,
    ReserveSpec,
    StaleEpochError,
    UnavailableError,
)
from kvlease._calling import calls
from kvlease.errors import LayoutMismatchError, WrongStateError
from kvlease.memory.mapped import table_layout
from kvlease.replies import Committed
from kvlease.tables import TableLayout, TablePart
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.frame_server import Drop, FrameServer, Hang, Regions

LEASE = pb.LeaseInfo(lease_id=6, age_ms=0)


MISSES = [
    pb.Miss(first_block=1, num_blocks=1, reason="evicted", tier="device", age_ms=0, why="it left"),
    pb.Miss(first_block=2, num_blocks=1, reason="shorter_than_a_block"),
]


class Daemon:
    """A daemon that grants lease after lease."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.epoch = 1
        self.newest = 10
        self.faults: list[Exception] = []
        self.survivors: tuple[int, ...] = ()
        self.hit_tokens = 16

    def __call__(self, call: pb.Call) -> Message:
        """Answer a call."""
        verb = call.WhichOneof("request") or ""
        if self.faults and verb not in ("attach", "heartbeat"):
            raise self.faults.pop(0)
        if verb == "attach":
            survivors = np.array(self.survivors, "<i8").tobytes()
            return self.regions.attached(epoch=self.epoch, lease_ids=survivors)
        if call.epoch not in (0, self.epoch):
            raise StaleEpochError
        if verb in ("reserve", "fork"):
            self.newest += 1
            self.regions.write_row(2, self.newest, [0, 1])
            ids = np.array([0, 1], "<i4").tobytes()
            granted = pb.ReserveResponse(
                lease_id=self.newest,
                block_ids=ids,
                row=2,
                device_hit_tokens=self.hit_tokens,
                covered_tokens=32,
            )
            if call.reserve.explain:
                granted.misses.extend(MISSES)
            return granted if verb == "reserve" else pb.ForkResponse(lease=granted)
        if verb == "step":
            # Only reserves.
            self.newest += 1
            granted = pb.ReserveResponse(
                lease_id=self.newest, row=2, device_hit_tokens=self.hit_tokens
            )
            return pb.StepResponse(reserves=[pb.StepReserve(granted=granted)])
        response: Message = {
            "release": pb.ReleaseResponse(released=True),
            "extend": pb.ExtendResponse(),
            "lookup": pb.LookupResponse(num_device_blocks=3),
            "commit": pb.CommitResponse(),
            "trim": pb.TrimResponse(num_given_back=1),
            "map": pb.MapResponse(row=2, num_kernel_blocks=2),
            "detach": pb.DetachResponse(num_leases=1),
            "heartbeat": pb.HeartbeatResponse(),
            "list_caches": pb.ListCachesResponse(),
            "explain": pb.ExplainResponse(
                lease_id=5, num_tokens=32, hit_tokens={"device": 16}, misses=MISSES
            ),
            "inspect": pb.InspectResponse(num_total=3, leases=[pb.LeaseInfo(lease_id=5), LEASE]),
            "stats": pb.StatsResponse(
                epoch=1, caches=[pb.CacheStats(cache="demo", counters={"grants": 2})]
            ),
        }[verb]
        return response


@pytest.fixture
def regions() -> Iterator[Regions]:
    """Give the memory of a cache."""
    with Regions() as regions:
        yield regions


@pytest.fixture
def daemon(regions: Regions) -> Daemon:
    """Give the answers of a daemon that has this memory."""
    return Daemon(regions)


@pytest.fixture
def server(tmp_path: Path, daemon: Daemon, regions: Regions) -> Iterator[FrameServer]:
    """Serve the daemon's answers at a Unix socket."""
    with FrameServer(path=tmp_path / "kvlease.sock", answer=daemon, fds=regions.fds) as server:
        yield server


@pytest.fixture
def client(server: FrameServer) -> Iterator[Client]:
    """Give a client of the server."""
    with Client(f"unix://{server.path}", deadline_seconds=2) as client:
        yield client


def test_worker_writes_into_the_shared_pool(client: Client, regions: Regions) -> None:
    """What a worker writes into `device` is in the daemon's memory, with no copy in between."""
    with client.attach("demo") as worker:
        assert worker.device is not None
        worker.device[5] = 77

        assert os.pread(regions.fds[0], 1, 5) == b"\x4d"
        assert (worker.plan, worker.worker_id, worker.death_proof) == (regions.plan, 7, "pidfd")


def test_worker_reads_its_rows_but_cannot_write_them(client: Client) -> None:
    """The block table is the daemon's: a worker sees what is published, and its mapping refuses writes."""
    with client.attach("demo") as worker, worker.reserve("r", num_tokens=32) as lease:
        assert worker.tables is not None
        assert worker.tables.block_ids(lease.row, lease.lease_id).tolist() == [0, 1]
        with pytest.raises(ValueError, match="read-only"):
            worker._session.memory._columns["lease_id"][0] = 1  # type: ignore[union-attr]


def test_lease_is_released_at_the_end_of_its_block(client: Client, server: FrameServer) -> None:
    """A lease is a context manager: whatever happens inside its block, the lease ends."""
    with client.attach("demo") as worker:
        with suppress(ZeroDivisionError), worker.reserve("r", num_tokens=32) as lease:
            assert (lease.block_ids.tolist(), lease.hit_tokens, lease.is_live) == ([0, 1], 16, True)
            raise ZeroDivisionError
        assert (lease.is_live, worker.num_leases) == (False, 0)

    assert server.verbs() == ["attach", "reserve", "release", "detach"]


def test_what_ends_a_block_is_not_hidden_by_its_release(server: FrameServer) -> None:
    """With on_doubt="raise" a lost daemon is told at a block's end, but not in place of what ended the block."""
    with (
        Client(f"unix://{server.path}", deadline_seconds=0.2, on_doubt="raise") as client,
        client.attach("demo") as worker,
    ):
        plain, ended = (worker.reserve(name, num_tokens=32) for name in ("r", "s"))
        server.stop()

        with pytest.raises((UnavailableError, DeadlineError)), plain:
            pass
        with pytest.raises(KeyboardInterrupt), ended:
            raise KeyboardInterrupt

        assert isinstance(ended.refusal, (UnavailableError, DeadlineError))
        assert (ended.is_live, worker.num_leases) == (False, 0)


async def test_what_ends_an_async_block_is_not_hidden_by_its_release(server: FrameServer) -> None:
    """A task that is cancelled in the block of a lease is cancelled, although the daemon is lost."""
    async with (
        AsyncClient(f"unix://{server.path}", deadline_seconds=0.2, on_doubt="raise") as client,
        await client.attach("demo") as worker,
    ):
        plain, ended = [await worker.reserve(name, num_tokens=32) for name in ("r", "s")]
        server.stop()

        async def leave(lease: AsyncLease, *, is_cancelled: bool) -> None:
            async with lease:
                if is_cancelled:
                    raise asyncio.CancelledError

        with pytest.raises((UnavailableError, DeadlineError)):
            await leave(plain, is_cancelled=False)
        with pytest.raises(asyncio.CancelledError):
            await leave(ended, is_cancelled=True)

        assert isinstance(ended.refusal, (UnavailableError, DeadlineError))
        assert (ended.is_live, worker.num_leases) == (False, 0)


def test_lease_is_used_through_its_own_worker_only(client: Client, server: FrameServer) -> None:
    """A call on another worker's lease is refused before it is sent, and the lease stays as it is."""
    with client.attach("demo") as owner, client.attach("demo") as other:
        lease = owner.reserve("r", num_tokens=32)

        for use in (
            lambda: other.extend(lease, 48),
            lambda: other.commit(lease, 16, bytes(32)),
            lambda: other.evict(lease),
            lambda: other.reload(lease),
            lambda: other.map(lease),
            lambda: other.fork(lease, "s", 48),
            lambda: other.trim(lease, 16),
            lambda: other.release(lease),
        ):
            with pytest.raises(InvalidError, match="belongs to worker 7, not to worker 7"):
                use()

        assert (lease.is_live, lease.refusal, owner.num_leases) == (True, None, 1)
        assert lease.release()
    assert server.verbs() == ["attach", "attach", "reserve", "release", "detach", "detach"]


@pytest.mark.parametrize("client_type", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"address": 5}, "address"),
        ({"address": 0}, "address"),
        ({"deadline_seconds": "5"}, "deadline_seconds"),
        ({"deadline_seconds": None}, "deadline_seconds"),
        ({"deadline_seconds": True}, "deadline_seconds"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"address": np.array([1, 2])}, "address"),
        ({"on_doubt": np.array([1, 2])}, "on_doubt"),
        ({"with_traces": np.array([1, 2])}, "with_traces"),
    ],
)
def test_options_of_the_wrong_type_are_refused(
    client_type: Any, arguments: dict[str, Any], name: str
) -> None:
    """An option that is no address or no number of seconds is refused by its name."""
    with pytest.raises(InvalidError) as caught:
        client_type(**arguments)

    assert caught.value.resource == name


@pytest.mark.parametrize("lease", [None, 5, "r", 0])
def test_what_is_no_lease_is_refused(client: Client, server: FrameServer, lease: Any) -> None:
    """A verb of a lease that is given anything else refuses it by name, and sends nothing."""
    with client.attach("demo") as worker:
        for use in (
            lambda: worker.extend(lease, 48),
            lambda: worker.commit(lease, 16, bytes(32)),
            lambda: worker.explain(lease),
            lambda: worker.map(lease),
            lambda: worker.fork(lease, "s", 48),
            lambda: worker.trim(lease, 16),
            lambda: worker.release(lease),
        ):
            with pytest.raises(InvalidError, match=r"^lease must be a lease, as reserve and fork"):
                use()
    assert server.verbs() == ["attach", "detach"]


@pytest.mark.parametrize("key_counts", [None, 2**64, "yes", [], 1.5])
async def test_key_counts_are_wanted_or_not(server: FrameServer, key_counts: Any) -> None:
    """An attach refuses what is neither true nor false."""
    address = f"unix://{server.path}"

    with Client(address) as client, pytest.raises(InvalidError, match=r"^key_counts must be true"):
        client.attach("demo", key_counts=key_counts)
    async with AsyncClient(address) as other:
        with pytest.raises(InvalidError, match=r"^key_counts must be true"):
            await other.attach("demo", key_counts=key_counts)


def test_lease_forks_and_is_trimmed(client: Client, server: FrameServer) -> None:
    """A fork is a lease of its own and ends by itself; a trimmed lease has the blocks that are left."""
    with client.attach("demo", engine="left") as worker, worker.reserve("r", num_tokens=32) as one:
        with one.fork("s", 48, wait_ms=5) as other:
            assert (other.request_id, other.blocks().tolist()) == ("s", [0, 1])
            assert (other.covered_tokens, worker.num_leases) == (32, 2)
        assert one.trim(16) == 1
        assert (one.blocks().tolist(), one.covered_tokens) == ([0], 16)

    assert server.calls[0].attach.engine == "left"
    assert server.verbs() == ["attach", "reserve", "fork", "release", "trim", "release", "detach"]


def test_priority_of_a_reserve_is_sent(client: Client, server: FrameServer) -> None:
    """The engine decides how soon a request is served and how long its blocks stay."""
    with client.attach("demo") as worker:
        worker.reserve("r", num_tokens=32, priority="low", retain_seconds=60, retain_priority=0)

    asked = pb.ReserveRequest(
        request_id="r", num_tokens=32, priority="low", retain_seconds=60, retain_priority=0
    )
    assert server.calls[1].reserve == asked


def test_misses_read_as_records(client: Client, server: FrameServer) -> None:
    """A reserve that asks for its misses has them at once; a lease may ask later; an operator asks by a lease's id."""
    with client.attach("demo") as worker:
        with (
            worker.reserve("r", num_tokens=32) as silent,
            worker.reserve("s", num_tokens=32, explain=True) as lease,
        ):
            explanation = silent.explain()
            told = lease.misses

        assert silent.misses == ()
    assert [(one.first_block, one.reason, one.age_ms) for one in told] == [
        (1, "evicted", 0),
        (2, "shorter_than_a_block", None),
    ]
    assert (explanation.num_tokens, dict(explanation.hit_tokens)) == (32, {"device": 16})
    assert explanation.misses == told
    assert client.explain_lease(5, cache="demo") == explanation
    assert server.calls[-1].explain == pb.ExplainRequest(lease_id=5, cache="demo")


def test_reserve_of_a_step_asks_for_its_misses() -> None:
    """A reserve in a step may ask for its misses just as a single reserve may."""
    spec = ReserveSpec(request_id="r", num_tokens=32, explain=True)

    request = calls.reserve_of(spec).request

    assert request == pb.ReserveRequest(request_id="r", num_tokens=32, explain=True)


async def test_misses_read_as_records_on_an_event_loop(server: FrameServer) -> None:
    """The asynchronous calls give the same records."""
    async with (
        AsyncClient(f"unix://{server.path}", deadline_seconds=2) as client,
        await client.attach("demo") as worker,
    ):
        lease = await worker.reserve("r", num_tokens=32, explain=True)
        explanation = await lease.explain()

        assert explanation.misses == lease.misses
        assert await client.explain_lease(5) == explanation


def test_none_is_no_argument(client: Client) -> None:
    """None in place of keys or of a number is the caller's mistake, not a miss."""
    nothing: Any = None
    with client.attach("demo") as worker, worker.reserve("r", num_tokens=32) as lease:
        for name, use in (
            ("num_tokens", lambda: worker.reserve("s", num_tokens=nothing)),
            ("num_tokens", lambda: lease.extend(nothing)),
            ("num_tokens", lambda: lease.trim(nothing)),
            ("request_id", lambda: lease.fork(nothing, 32)),
            ("keys", lambda: lease.commit(16, nothing)),
            ("keys", lambda: worker.lookup(nothing)),
            ("keys", lambda: worker.pin(nothing)),
        ):
            with pytest.raises(InvalidError) as caught:
                use()
            assert caught.value.resource == name


def test_lease_and_worker_show_life(client: Client) -> None:
    """The repr of a lease or of a worker shows its state."""
    with client.attach("demo") as worker:
        lease = worker.reserve("r", num_tokens=32)
        assert repr(worker) == "<Worker 7 of 'demo', 1 leases>"
        assert repr(lease) == "<Lease 11 of 'r', 2 blocks>"
        lease.release()
        assert repr(lease) == "<Lease 11 of 'r', released>"


def test_worker_goes_on_over_a_broken_connection(client: Client, server: FrameServer) -> None:
    """A broken connection costs a worker nothing: it connects again and repeats the call."""
    with client.attach("demo") as worker:
        server.break_connections()

        assert worker.lookup(bytes(32)).num_device_blocks == 3


def test_worker_has_a_deadline_of_its_own(client: Client) -> None:
    """The client's deadline holds for attaching; the worker's own deadline, which may change, holds for its calls."""
    with client.attach("demo") as worker, client.attach("demo", deadline_seconds=0.5) as hasty:
        assert (worker.deadline_seconds, hasty.deadline_seconds) == (2, 0.5)
        assert worker.memory_identity == hasty.memory_identity != ()
        hasty.deadline_seconds = 7
        assert hasty._session.link.deadline_seconds == 7
        for wrong in (0, -1, float("inf"), float("nan")):
            with pytest.raises(InvalidError, match="deadline_seconds"):
                hasty.deadline_seconds = wrong
            with pytest.raises(InvalidError, match="deadline_seconds"):
                client.attach("demo", deadline_seconds=wrong)


def test_worker_survives_the_daemons_restart(
    client: Client, server: FrameServer, daemon: Daemon
) -> None:
    """After a restart the worker attaches again within the call, and keeps its memory and the leases that survived."""
    with client.attach("demo") as worker:
        kept, lost = worker.reserve("kept", num_tokens=32), worker.reserve("lost", num_tokens=32)
        device = worker.device
        daemon.epoch, daemon.survivors = 2, (kept.lease_id,)
        daemon.regions.write_row(2, kept.lease_id, [0, 1])
        server.break_connections()

        assert worker.map(kept) == 2
        assert (kept.is_live, lost.is_live, worker.epoch) == (True, False, 2)
        assert (worker.device is device, worker.memory_generation) == (True, 1)


def test_blocks_of_an_unanswered_extend_come_from_the_table(
    client: Client, server: FrameServer, daemon: Daemon
) -> None:
    """Where the daemon dies after it has carried out an extend, the blocks are read from the row that outlives it."""
    with client.attach("demo") as worker:
        lease = worker.reserve("r", num_tokens=32)
        daemon.regions.write_row(lease.row, lease.lease_id, [0, 1, 5])
        daemon.epoch, daemon.survivors = 2, (lease.lease_id,)
        server.break_connections()

        assert lease.extend(48)
        assert lease.block_ids.tolist() == [0, 1, 5]


def test_other_memory_after_a_restart_is_mapped_anew(
    client: Client, server: FrameServer, daemon: Daemon
) -> None:
    """When the memory itself is lost, the worker maps the new memory, and says so."""
    with client.attach("demo") as worker, Regions() as fresh:
        old, identity = worker.device, worker.memory_identity
        assert old is not None
        server.fds, daemon.regions, daemon.epoch = fresh.fds, fresh, 2

        worker.lookup(bytes(32))

        assert worker.memory_generation == 2
        assert worker.memory_identity != identity
        assert worker.device is not None
        worker.device[0], old[0] = 1, 2  # A view of the old memory stays valid.
        assert os.pread(fresh.fds[0], 1, 0) == b"\x01"


def begin_anew(server: FrameServer, daemon: Daemon, fresh: Regions) -> None:
    """Have the daemon end with its memory, and start with other memory."""
    server.fds, daemon.regions, daemon.epoch = fresh.fds, fresh, 2


def test_hits_are_refused_to_views_of_memory_that_ended(
    client: Client, server: FrameServer, daemon: Daemon
) -> None:
    """A worker with views of the old memory would read wrong bytes: until it looks at the new memory it has no hits."""
    with client.attach("demo") as worker, Regions() as fresh:
        assert worker.device is not None
        begin_anew(server, daemon, fresh)

        refused = worker.reserve("r", num_tokens=32)
        assert (refused.is_live, type(refused.refusal)) == (False, WrongStateError)
        assert refused.refusal is not None
        assert (refused.refusal.resource, refused.refusal.rule) == ("memory", "other_memory")
        (in_step,) = worker.step(
            verbs=[],
            lease_ids=[],
            num_tokens=[],
            reserves=[ReserveSpec(request_id="s", num_tokens=32)],
        )[1]
        assert (in_step.is_live, type(in_step.refusal)) == (False, WrongStateError)
        assert server.verbs().count("release") == 2, "nobody keeps what was refused"

        assert worker.device is not None
        assert worker.reserve("r", num_tokens=32).is_live


def test_nothing_is_committed_through_views_of_memory_that_ended(
    client: Client, server: FrameServer, daemon: Daemon
) -> None:
    """A worker with views of the old memory commits nothing: what it computed is not in the memory that others read."""
    daemon.hit_tokens = 0
    with client.attach("demo") as worker, Regions() as fresh:
        assert worker.device is not None
        begin_anew(server, daemon, fresh)
        lease = worker.reserve("r", num_tokens=32)
        assert lease.is_live, "there is nothing in it to be misread"

        assert lease.commit(16, bytes(32)) == Committed()
        assert (lease.is_live, type(lease.refusal)) == (True, WrongStateError)
        columns, _ = worker.step(
            verbs=[pb.STEP_VERB_COMMIT],
            lease_ids=[lease.lease_id],
            num_tokens=[16],
            keys=bytes(32),
            num_keys=[1],
        )
        assert columns.codes.tolist() == [WrongStateError.number]
        assert not {"commit", "step"} & set(server.verbs())

        assert worker.device is not None
        lease.commit(16, bytes(32))
        assert (lease.refusal, server.verbs().count("commit")) == (None, 1)


def test_worker_that_looks_at_no_memory_goes_on_over_other_memory(
    client: Client, server: FrameServer, daemon: Daemon
) -> None:
    """A scheduler whose ranks touch the memory has no views to make anew."""
    with client.attach("demo") as worker, Regions() as fresh:
        begin_anew(server, daemon, fresh)
        lease = worker.reserve("r", num_tokens=32)
        lease.commit(16, bytes(32))
        assert (lease.hit_tokens, lease.is_live, lease.refusal) == (16, True, None)


def test_call_is_repeated_with_its_key(client: Client, server: FrameServer, daemon: Daemon) -> None:
    """A call whose answer was lost is repeated under the same idempotency key."""
    with client.attach("demo") as worker:
        daemon.faults = [Drop()]
        assert worker.reserve("r", num_tokens=32).is_live

    keys = [call.idempotency_key for call in server.calls if call.HasField("reserve")]
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_silent_daemon_is_a_miss_by_the_deadline(server: FrameServer, daemon: Daemon) -> None:
    """A daemon that does not answer costs a worker its deadline, never an exception."""
    with (
        Client(f"unix://{server.path}", deadline_seconds=0.5) as client,
        client.attach("demo") as worker,
    ):
        daemon.faults = [Hang()]

        lease = worker.reserve("r", num_tokens=32)

        assert (lease.is_live, lease.refusal and lease.refusal.code) == (False, "DEADLINE")
        assert repr(lease) == "<Lease 0 of 'r', ended: DEADLINE>"


def test_dead_daemon_is_a_miss(server: FrameServer) -> None:
    """Without a daemon a worker computes everything; after the first deadline its calls return at once."""
    with (
        Client(f"unix://{server.path}", deadline_seconds=0.2) as client,
        client.attach("demo") as worker,
    ):
        lease = worker.reserve("r", num_tokens=32)
        server.stop()

        assert worker.lookup(bytes(32)).num_device_blocks == 0
        assert not worker.reserve("s", num_tokens=32).is_live
        assert lease.release() is False


def test_attach_waits_for_a_daemon_that_is_not_there_yet(tmp_path: Path, regions: Regions) -> None:
    """A worker that starts before its daemon waits for it until the deadline; an operator is told at once."""
    path = tmp_path / "late.sock"
    late = FrameServer(path=path, answer=Daemon(regions), fds=regions.fds)
    with Client(f"unix://{path}", deadline_seconds=5) as client, pytest.raises(UnavailableError):
        client.list_caches()

    starting = threading.Timer(0.05, late.__enter__)
    starting.start()
    with Client(f"unix://{path}", deadline_seconds=5) as client, client.attach("demo") as worker:
        assert worker.worker_id == 7
    starting.join()
    late.__exit__()


def test_doubt_is_raised_when_asked_for(server: FrameServer) -> None:
    """With on_doubt="raise" a call in doubt raises an error."""
    with (
        Client(f"unix://{server.path}", deadline_seconds=0.2, on_doubt="raise") as client,
        client.attach("demo") as worker,
    ):
        server.stop()
        # On a busy machine the deadline may come first.
        with pytest.raises((UnavailableError, DeadlineError)):
            worker.reserve("r", num_tokens=32)


def test_heartbeats_carry_the_inventory(client: Client, server: FrameServer) -> None:
    """A thread with a connection of its own tells the daemon which leases live; it ends with the worker."""
    beaten = threading.Event()
    answer: Callable[[pb.Call], Message] = server.answer

    def noticing(call: pb.Call) -> Message:
        response = answer(call)
        if call.HasField("heartbeat") and call.heartbeat.lease_ids:
            beaten.set()
        if isinstance(response, pb.AttachResponse):
            response.heartbeat_seconds = 0.01
        return response

    server.answer = noticing
    with client.attach("demo") as worker:
        lease = worker.reserve("r", num_tokens=32)
        assert beaten.wait(5)
        name = worker._thread.name

    beats = [
        call.heartbeat
        for call in server.calls
        if call.HasField("heartbeat") and call.heartbeat.lease_ids
    ]
    assert np.frombuffer(beats[0].lease_ids, "<i8").tolist() == [lease.lease_id]
    assert name not in {thread.name for thread in threading.enumerate()}


def test_closed_worker_leaves_nothing_open(client: Client) -> None:
    """Everything that a worker opened is closed with it: descriptors, maps and threads."""
    client.list_caches()
    before = set(Path("/proc/self/fd").iterdir())

    with client.attach("demo") as worker:
        worker.heartbeat()
        lease = worker.reserve("r", num_tokens=32)
    del worker, lease
    gc.collect()

    left = {fd for fd in set(Path("/proc/self/fd").iterdir()) - before if _is_ours(fd)}
    assert left == set()


def _is_ours(fd: Path) -> bool:
    """Tell whether a map is ours, and not one of the sockets that the server's threads here are still closing."""
    try:
        return "memfd" in str(fd.readlink())
    except FileNotFoundError:
        return False


def test_view_outlives_its_worker(client: Client) -> None:
    """A view that a caller keeps can still be read after its worker closed; whatever it shows, there is no fault."""
    with client.attach("demo") as worker:
        view = worker.device

    assert view is not None
    assert view.sum() == 0


def test_forked_child_must_attach_for_itself(client: Client) -> None:
    """A forked child may neither call nor touch the memory; it may close what it inherited, and ends no session."""
    with client.attach("demo") as worker:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for use in (
                    lambda: worker.lookup(bytes(32)),
                    lambda: worker.device,
                    lambda: worker.gpu,
                    lambda: worker.tables,
                ):
                    with pytest.raises(InvalidError, match="a forked child must open"):
                        use()
                worker.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

        assert worker.lookup(bytes(32)).num_device_blocks == 3


def test_region_smaller_than_the_plan_is_refused(client: Client, regions: Regions) -> None:
    """Memory that ends before the plan's end is not mapped: it would fault later."""
    os.ftruncate(regions.fds[0], 64)

    with pytest.raises(LayoutMismatchError):
        client.attach("demo")


@pytest.mark.parametrize("num_rows", [1, 7, 16, 1000, 1024])
@pytest.mark.parametrize("blocks_per_row", [1, 4, 333])
def test_table_is_laid_out_as_its_bytes_tell(num_rows: int, blocks_per_row: int) -> None:
    """The bytes of a table's region determine where each of its columns lies."""
    parts = (
        TablePart(num_places=blocks_per_row, kernel_blocks_per_block=2, kernel_block_stride=3),
        TablePart(num_places=2),
    )
    layout = TableLayout(num_rows, parts)
    region = np.arange(layout.region_bytes, dtype=np.int64).astype(np.uint8)

    found = table_layout(layout.region_bytes, parts)

    assert found.num_rows >= num_rows
    for name, column in layout.columns(region).items():
        assert np.array_equal(found.columns(region)[name][:num_rows], column)


def test_table_of_an_unknown_shape_is_refused() -> None:
    """A region whose size no table fits exactly is of another version, and is refused."""
    parts = (TablePart(num_places=4),)

    with pytest.raises(LayoutMismatchError):
        table_layout(TableLayout(16, parts).region_bytes + 4, parts)


def test_statistics_read_by_name(client: Client) -> None:
    """Answers to an operator are records whose fields have the protocol's names."""
    stats = client.stats()

    assert (stats.epoch, stats.caches[0].cache, stats.caches[0].counters) == (
        1,
        "demo",
        {"grants": 2},
    )


def test_inspection_reads_as_records(client: Client, server: FrameServer) -> None:
    """A page is a list of entries as records; a lease of an earlier life of the daemon has no age."""
    page = client.inspect("demo", "leases", limit=2, after_id=4)

    assert (page.num_total, page.workers, page.pins) == (3, (), ())
    assert [(lease.lease_id, lease.age_ms) for lease in page.leases] == [(5, None), (6, 0)]
    asked = pb.InspectRequest(cache="demo", what="leases", limit=2, after_id=4)
    assert server.calls[-1].inspect == asked


def test_waiting_calls_and_tenants_read_as_records(client: Client, server: FrameServer) -> None:
    """Waiting calls and the blocks of tenants are records whose fields have the protocol's names."""
    waiting = pb.WaitingInfo(call_id=4, verb="extend", priority="low", reason="copies", left_ms=9)
    tenant = pb.TenantInfo(tenant_id=1, tenant="acme", used_blocks=7, weight=1.5)
    page = pb.InspectResponse(num_total=1, waiting=[waiting], tenants=[tenant])
    server.answer = lambda _: page

    read = client.inspect("demo", "waiting")

    assert (read.waiting[0].call_id, read.waiting[0].reason) == (4, "copies")
    assert (read.tenants[0].tenant, read.tenants[0].weight) == ("acme", 1.5)


def test_magazines_read_as_records(client: Client, server: FrameServer) -> None:
    """The workers that share a magazine are a tuple; a magazine without an exchange has no age."""
    packed = (7).to_bytes(8, "little") + (8).to_bytes(8, "little")
    old = pb.MagazineInfo(magazine_id=1, worker_ids=packed, private_blocks=3, age_ms=0)
    page = pb.InspectResponse(num_total=2, magazines=[old, pb.MagazineInfo(magazine_id=2)])
    server.answer = lambda _: page

    first, second = client.inspect("demo", "magazines").magazines

    assert (first.worker_ids, first.private_blocks, first.age_ms) == ((7, 8), 3, 0)
    assert (second.worker_ids, second.age_ms) == ((), None)


def test_operators_errors_are_always_raised(client: Client, daemon: Daemon) -> None:
    """An operator's call has no miss: every failure is raised."""
    daemon.faults = [KVLeaseError("odd")]
    with pytest.raises(KVLeaseError, match="odd"):
        client.list_caches()
    with pytest.raises(InvalidError):
        client.plan(PlanInputs(tokens_per_block=-1))


# The same for an event loop


async def test_async_worker_does_the_same(server: FrameServer, regions: Regions) -> None:
    """The asynchronous worker has the same memory and the same verbs."""
    async with (
        AsyncClient(f"unix://{server.path}", deadline_seconds=2) as client,
        await client.attach("demo") as worker,
    ):
        assert worker.device is not None
        worker.device[5] = 77
        async with await worker.reserve("r", num_tokens=32) as lease:
            assert (lease.block_ids.tolist(), await lease.map(), worker.num_leases) == (
                [0, 1],
                2,
                1,
            )
        await worker.heartbeat()

    assert os.pread(regions.fds[0], 1, 5) == b"\x4d"
    assert server.verbs() == ["attach", "reserve", "map", "release", "detach"]


async def test_close_of_an_async_worker_can_be_cancelled(
    server: FrameServer, daemon: Daemon
) -> None:
    """A close that waits can be cancelled at any of its waits; a second close ends the worker."""
    async with AsyncClient(f"unix://{server.path}", deadline_seconds=2) as client:
        worker = await client.attach("demo")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await worker.close()
        daemon.faults = [Hang()]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await worker.close()
        await worker.close()

    assert server.verbs() == ["attach", "detach", "", "detach"]  # with a cancel between


async def test_dropped_async_worker_renews_nothing(server: FrameServer) -> None:
    """The heartbeat's task does not keep its worker alive: a worker that is dropped without a close falls silent."""
    async with AsyncClient(f"unix://{server.path}", deadline_seconds=2) as client:
        worker = await client.attach("demo")
        name = f"kvlease-worker-{worker.worker_id}"
        lease, port = await worker.reserve("r", num_tokens=32), worker._port
        await asyncio.sleep(0)
        with pytest.warns(ResourceWarning, match="unclosed <AsyncWorker"):  # noqa: PT031 -- dropped, then collected
            del worker, lease
            gc.collect()

        end = asyncio.get_running_loop().time() + 5
        while any(task.get_name() == name for task in asyncio.all_tasks()):
            assert asyncio.get_running_loop().time() < end
            await asyncio.sleep(0.01)
        await port.transport.close()


def test_lease_is_moved_alone(server: FrameServer) -> None:
    """Keys or a number of blocks beside a lease are refused, not ignored."""
    with (
        Client(f"unix://{server.path}", deadline_seconds=2) as client,
        client.attach("demo") as worker,
    ):
        lease = worker.reserve("r", num_tokens=32)

        with pytest.raises(InvalidError, match="num_blocks is given together with a lease"):
            worker.evict(lease, num_blocks=3)
        with pytest.raises(InvalidError, match="keys is given together with a lease"):
            worker.reload(lease, keys=bytes(32))
        with pytest.raises(InvalidError, match="keys is given together with a lease"):
            worker.evict(lease, keys=np.zeros(2, np.uint8))  # type: ignore[arg-type]  # the mistake

    assert "evict" not in {call.WhichOneof("request") for call in server.calls}


async def test_async_lease_forks_and_is_trimmed(server: FrameServer) -> None:
    """The asynchronous lease has the same methods."""
    async with (
        AsyncClient(f"unix://{server.path}", deadline_seconds=2) as client,
        await client.attach("demo", engine="left") as worker,
    ):
        one = await worker.reserve(
            "r", num_tokens=32, priority="high", retain_seconds=9, retain_priority=99
        )
        async with await one.fork("s", 48) as other:
            assert (other.blocks().tolist(), other.covered_tokens) == ([0, 1], 32)
        assert (await one.trim(16), one.blocks().tolist()) == (1, [0])

    assert server.calls[0].attach.engine == "left"
    asked = server.calls[1].reserve
    assert (asked.priority, asked.retain_seconds, asked.retain_priority) == ("high", 9, 99)


async def test_async_calls_share_a_connection(server: FrameServer, daemon: Daemon) -> None:
    """A call that waits does not hold up the others: answers are told apart by their numbers."""
    async with AsyncClient(
        f"unix://{server.path}", deadline_seconds=0.3, on_doubt="raise"
    ) as client:
        await client.list_caches()
        daemon.faults = [Hang()]
        hanging = asyncio.create_task(client.stats())
        await asyncio.sleep(0)

        assert await client.list_caches() == ()
        with pytest.raises(KVLeaseError, match="deadline"):
            await hanging

    assert len(server._connections) == 1


async def test_async_worker_survives_the_daemons_restart(
    server: FrameServer, daemon: Daemon
) -> None:
    """The asynchronous worker attaches again within the call, too."""
    async with (
        AsyncClient(f"unix://{server.path}", deadline_seconds=2) as client,
        await client.attach("demo") as worker,
    ):
        lease = await worker.reserve("r", num_tokens=32)
        daemon.epoch, daemon.survivors = 2, (lease.lease_id,)
        server.break_connections()

        assert await lease.map() == 2
        assert (lease.is_live, worker.epoch) == (True, 2)


async def test_cancelled_attach_keeps_no_memory(server: FrameServer, daemon: Daemon) -> None:
    """An attach whose caller gave up closes the memory that its answer brings, however late."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(call: pb.Call) -> Message:
        begun.set()
        go_on.wait(5)
        return daemon(call)

    server.answer = slow
    before = _memfds()
    async with AsyncClient(f"unix://{server.path}", deadline_seconds=5) as client:
        attaching = asyncio.create_task(client.attach("demo"))
        await asyncio.to_thread(begun.wait)
        attaching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attaching
        go_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        await asyncio.sleep(0)

    assert _memfds() == before


def _memfds() -> int:
    return sum(_is_ours(fd) for fd in Path("/proc/self/fd").iterdir())


async def test_async_dead_daemon_is_a_miss(server: FrameServer) -> None:
    """Without a daemon the asynchronous worker computes everything, too."""
    async with (
        AsyncClient(f"unix://{server.path}", deadline_seconds=1) as client,
        await client.attach("demo") as worker,
    ):
        server.stop()
        lease = await worker.reserve("r", num_tokens=32)

    assert (lease.is_live, lease.refusal and lease.refusal.code) == (False, "UNAVAILABLE")
