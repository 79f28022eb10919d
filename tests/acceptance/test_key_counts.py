"""Key counts over real processes: absent keys are known without a call, and wrong news never lasts."""

import secrets
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from kvlease import AsyncClient, Client, ExchangeOrder, InvalidError, Worker
from kvlease.ids import BYTES_PER_KEY
from tests.acceptance.serving import Serving, new_cache
from tests.acceptance.standing import Standing
from tests.acceptance.test_client import INPUTS

pytestmark = pytest.mark.acceptance


@pytest.fixture
def client(daemon: Serving) -> Iterator[Client]:
    """Give a client of a cache of 32 blocks."""
    with new_cache(daemon, "demo", INPUTS) as client:
        yield client


def reader(client: Client, tenant: str = "default") -> Worker:
    """Attach a worker that reads its tenant's counts."""
    return client.attach("demo", tenant=tenant, magazine=f"of {tenant}", key_counts=True)


def fresh_keys(count: int) -> list[bytes]:
    """Return new random keys."""
    return [secrets.token_bytes(BYTES_PER_KEY) for _ in range(count)]


def publish(worker: Worker, keys: list[bytes]) -> np.ndarray:
    """Publish blocks under the keys, hold none of them, and return their ids."""
    magazine = worker.magazine()
    blocks = magazine.exchange(ExchangeOrder(take_new=len(keys))).taken_new
    order = ExchangeOrder(publish_blocks=blocks, publish_keys=b"".join(keys), drop_blocks=blocks)
    assert magazine.exchange(order).published.tolist() == [1] * len(keys)
    return blocks


def test_what_is_cached_is_never_absent(client: Client) -> None:
    """A key is never absent once its publish is answered, for any reader; most keys that nobody has are absent."""
    with reader(client) as one, reader(client) as other:
        keys, strangers = fresh_keys(8), fresh_keys(100)
        assert sum(one.absent(keys)) == len(keys)

        publish(one, keys)

        assert one.absent(keys) == other.absent(keys) == [False] * len(keys)
        assert sum(other.absent(strangers)) > len(strangers) // 2


def test_what_left_is_absent_again(client: Client) -> None:
    """A clear takes keys out of the counts as it takes them out of the cache."""
    with reader(client) as worker:
        keys = fresh_keys(8)
        publish(worker, keys)

        client.clear(cache="demo")

        assert worker.absent(keys) == [True] * len(keys)


async def test_async_worker_tells_what_is_absent(client: Client, daemon: Serving) -> None:
    """It tells without a call, too; after a restart it tells nothing until it has the next life's counts."""
    keys, strangers = fresh_keys(8), fresh_keys(100)
    async with (
        AsyncClient(daemon.address("unix")) as other,
        await other.attach("demo", magazine="async", key_counts=True) as worker,
        await other.attach("demo") as uncounted,
    ):
        assert sum(worker.absent(keys)) == len(keys)
        with client.attach("demo", magazine="blocking") as publisher:
            publish(publisher, keys)

        assert not any(worker.absent(keys))
        assert sum(worker.absent(strangers)) > len(strangers) // 2
        assert not any(uncounted.absent(strangers))
        daemon.kill_control()
        daemon.until(lambda: not any(worker.absent(strangers)))

        daemon.wait_until_ready()
        assert not any(worker.absent(strangers))
        await worker.heartbeat()
        assert sum(worker.absent(strangers)) > len(strangers) // 2
        assert not any(worker.absent(keys))


def test_who_did_not_ask_for_counts_is_told_nothing(client: Client, daemon: Serving) -> None:
    """Without counts, and over transports that hand over no memory, no key is told to be absent."""
    keys = fresh_keys(4)
    with client.attach("demo") as worker:
        assert not any(worker.absent(keys))
    with (
        Client(daemon.address("http+unix")) as remote,
        remote.attach("demo", key_counts=True) as worker,
    ):
        assert not any(worker.absent(keys))


def test_packed_keys_are_refused_with_counts_and_without(client: Client) -> None:
    """Packed keys, which other calls take, are refused rather than read as a list of numbers."""
    packed = b"".join(fresh_keys(4))
    with reader(client) as counting, client.attach("demo") as plain:
        for worker in (counting, plain):
            with pytest.raises(InvalidError, match="split packed keys"):
                worker.absent(packed)  # type: ignore[arg-type]


def test_restarted_control_process_counts_what_is_there(client: Client, daemon: Serving) -> None:
    """While the control process is away no key is told to be absent; afterwards it counts all that it finds."""
    with reader(client) as worker:
        keys, strangers = fresh_keys(8), fresh_keys(100)
        publish(worker, keys)
        daemon.kill_control()
        daemon.until(lambda: not any(worker.absent(strangers)))

        daemon.wait_until_ready()
        worker.heartbeat()
        worker.magazine().inventory()

        assert not any(worker.absent(keys))
        assert sum(worker.absent(strangers)) > len(strangers) // 2
        publish(worker, strangers[:8])
        assert not any(worker.absent(strangers[:8]))


def test_killed_daemon_leaves_no_answer_behind(standing: Standing) -> None:
    """Counts of a dead daemon tell nothing, and the next daemon's counts begin with its own keys."""
    with standing.lent() as serving, new_cache(serving, "demo", INPUTS) as client:
        worker = reader(client)
        keys = fresh_keys(8)
        publish(worker, keys)

        serving.restart(is_killed=True)
        assert not any(worker.absent(fresh_keys(8)))
        worker.heartbeat()
        worker.magazine().inventory()

        assert all(worker.absent(keys))
        publish(worker, keys)
        assert not any(worker.absent(keys))
        worker.close()


def test_tenants_see_their_own_counts_alone(client: Client) -> None:
    """A tenant's counts do not change with what another tenant publishes."""
    with reader(client, "a") as one, reader(client, "b") as other:
        keys = fresh_keys(8)
        before = _counts(other)

        publish(one, keys)

        assert not any(one.absent(keys))
        assert _counts(other) == before == bytes(len(before))


def test_no_reader_can_write(client: Client) -> None:
    """The mapping is read-only; tests of the region prove that no other mapping can be made."""
    with reader(client) as worker:
        counts = worker._session.key_counts
        assert counts is not None
        assert counts._words.readonly


def test_last_reader_takes_the_counts_along(client: Client, daemon: Serving) -> None:
    """A tenant's counts take memory from its first reader's attach until its last reader's end."""
    with reader(client):
        num_bytes = used_bytes(daemon)
        assert num_bytes > 0
        with reader(client), reader(client, "another"):
            assert used_bytes(daemon) == 2 * num_bytes
    assert used_bytes(daemon) == 0


def used_bytes(daemon: Serving) -> int:
    """Return the bytes of all key counts, as the metrics have them."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(f"{daemon.runtime_dir}/http.sock")
        asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with asking.makefile("r") as answer:
            (found,) = [one for one in answer if one.startswith("kvlease_key_counts_bytes ")]
    return int(float(found.split()[-1]))


def _counts(worker: Worker) -> bytes:
    counts = worker._session.key_counts
    assert counts is not None
    return bytes(counts._words[16:])
