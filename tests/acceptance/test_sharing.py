"""Who gets what of too small a pool: from a settings file to what operators and refused callers read."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvlease import Client, FullAttention, PlanInputs, PoolFullError, Worker
from tests.acceptance.serving import Serving, command, new_cache, pool_of, served

pytestmark = pytest.mark.acceptance

LAYER = FullAttention(name="0", num_kv_heads=1, head_size=16, dtype="float32")
INPUTS = PlanInputs(layers=(LAYER,), tokens_per_block=16, device_blocks=40)
NUM_TOKENS = 40 * 16
SETTINGS = """
ageing_seconds = 600

[tenants.chat]
min_percent = 25
weight = 3

[tenants.batch]
max_percent = 50
pinned_percent_max = 10
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Run a daemon with a settings file for this module."""
    directory = tmp_path_factory.mktemp("sharing")
    file = directory / "kvleased.toml"
    file.write_text(SETTINGS)
    with served(directory / "run", "--config", str(file)) as serving:
        yield serving


@pytest.fixture
def client(daemon: Serving) -> Iterator[Client]:
    """Register a new cache, and give its client."""
    with new_cache(daemon, "shared", INPUTS) as client:
        yield client


def listed(daemon: Serving, what: str) -> Any:
    """Return what the command line lists of the cache, as JSON."""
    return json.loads(command(daemon.address("unix"), what, "--json"))["shared"][what]


def cached(worker: Worker, num_tokens: int, first: int = 0) -> bytes:
    """Leave cached blocks; returns their keys."""
    keys = worker.keys.chain(range(first, first + num_tokens), 16)
    with worker.reserve(f"cached {first}", num_tokens=num_tokens) as lease:
        pool_of(worker)[lease.block_ids] = 1
        lease.commit(num_tokens, keys)
    return keys


# Waiting --------------------------------------------------------------------------------------------------------------


def test_waiting_calls_are_listed_and_served_by_priority(daemon: Serving, client: Client) -> None:
    """Waiting calls are listed with their place and what they wait for; higher priority is served first."""
    with client.attach("shared", tenant="other") as worker:
        held = worker.reserve("held", num_tokens=NUM_TOKENS)
        served: list[str] = []

        def wait(priority: Any) -> None:
            with worker.reserve(
                priority, num_tokens=NUM_TOKENS // 2 + 16, wait_ms=60_000, priority=priority
            ):
                served.append(priority)

        threads = [threading.Thread(target=wait, args=(one,)) for one in ("low", "high")]
        for number, thread in enumerate(threads, start=1):
            thread.start()
            daemon.until(lambda n=number: client.stats("shared").caches[0].num_waiting == n)  # type: ignore[misc]

        waiting = {one["priority"]: one for one in listed(daemon, "waiting")}
        shown = command(daemon.address("unix"), "waiting")

        assert [waiting[one]["position"] for one in ("high", "low")] == [0, 1]
        assert [waiting[one]["reason"] for one in ("high", "low")] == ["blocks", "position"]
        assert (waiting["low"]["num_blocks"], waiting["low"]["available_blocks"]) == (21, 0)
        assert "position" in shown
        assert "position" in shown
        held.release()
        for thread in threads:
            thread.join(30)
        assert served == ["high", "low"]
        assert "no call is waiting" in command(daemon.address("unix"), "waiting")


def test_metrics_count_waiting_calls_and_blocks_of_tenants(daemon: Serving, client: Client) -> None:
    """Metrics tell what the command line lists, with only the tenants that are configured or attached."""
    with client.attach("shared", tenant="chat") as worker, worker.reserve("held", num_tokens=64):
        found = metrics(daemon)

    device = 'kvlease_tenant_blocks{{cache="shared",state="{}",tenant="{}",tier="device"}}'
    assert found[device.format("held", "chat")] == 4
    assert found[device.format("held", "batch")] == 0
    assert found['kvlease_waiting_requests{cache="shared",priority="high"}'] == 0


def metrics(daemon: Serving) -> dict[str, float]:
    """Return every metric's value, by name and labels."""
    status, body = ask(daemon, "GET", "/metrics")
    assert status == 200
    lines = (line.rpartition(" ") for line in body.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


# Tenants --------------------------------------------------------------------------------------------------------------


def test_tenants_are_listed_with_what_they_have_and_may_have(
    daemon: Serving, client: Client
) -> None:
    """The file's limits are listed in blocks under the tenants' names, also for a tenant without workers."""
    with client.attach("shared", tenant="chat") as chat:
        cached(chat, 64)
        with chat.reserve("r", num_tokens=32):
            tenants = {one["tenant"]: one for one in listed(daemon, "tenants")}
            shown = command(daemon.address("unix"), "tenants")

    assert set(tenants) == {"chat", "batch"}
    names = ("used_blocks", "held_blocks", "min_blocks", "max_blocks", "pinned_blocks_max")
    assert [tenants["chat"][name] for name in names] == [6, 2, 10, 40, 10]
    assert [tenants["batch"][name] for name in names] == [0, 0, 0, 20, 4]
    assert "batch" in shown


def test_minimum_and_maximum_hold(client: Client) -> None:
    """A tenant never gets more than its maximum, nor what another's minimum needs."""
    with (
        client.attach("shared", tenant="chat") as chat,
        client.attach("shared", tenant="batch") as batch,
        client.attach("shared", tenant="other") as other,
        batch.reserve("full", num_tokens=20 * 16),
    ):
        with pytest.raises(PoolFullError) as above:
            batch.reserve("more", num_tokens=16)
        with other.reserve("rest", num_tokens=10 * 16):
            with pytest.raises(PoolFullError) as below:
                other.reserve("more", num_tokens=16)
            with chat.reserve("minimum", num_tokens=10 * 16) as lease:
                assert lease.is_live

    assert (above.value.resource, above.value.limit) == ("tenant_blocks", 20)
    assert (below.value.resource, below.value.available) == ("device_blocks", 0)


def test_pins_end_at_their_budget(client: Client) -> None:
    """A tenant pins as much as its settings allow, and its refusal says how much is left."""
    with client.attach("shared", tenant="batch") as batch:
        keys = cached(batch, 8 * 16)
        pinned = batch.pin(keys[: 3 * 32])

        with pytest.raises(PoolFullError) as caught:
            batch.pin(keys)

        error = caught.value
        assert (error.resource, error.need, error.available, error.limit) == (
            "pinned_blocks", 5, 1, 4,
        )  # fmt: skip
        assert batch.pin(keys[: 4 * 32]).num_blocks == 4
        batch.unpin(pinned.pin_id)


# Refusals -------------------------------------------------------------------------------------------------------------


def ask(
    daemon: Serving, method: str, path: str, body: object = None, token: str = ""
) -> tuple[int, str]:
    """Send an HTTP request as any program would; return status and body."""
    connection = http.client.HTTPConnection("localhost", timeout=20)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(daemon.runtime_dir / "http.sock"))
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    answer = response.status, response.read().decode()
    connection.close()
    return answer


def test_refusal_over_rest_says_who_has_the_blocks_and_what_would_be_granted(
    daemon: Serving, client: Client
) -> None:
    """A refusal has the problem document that the docs show, and the recommended request is granted."""
    with rest_worker(daemon) as token, client.attach("shared", tenant="chat") as chat:
        cached(chat, 8 * 16)
        with chat.reserve("held", num_tokens=20 * 16):
            reserve(daemon, token, "running", 5 * 16)

            status, text = reserve(daemon, token, "long", 512)

            problem = json.loads(text)
            assert (status, problem) == (429, shown_problem())
            for remedy in problem["remedies"]:
                said = dict(one.split("=") for one in remedy.split())
                numbers = {name: int(number) for name, number in said.items()}
                status, text = reserve(daemon, token, remedy, **numbers)
                assert status == 200, text
                lease_id = json.loads(text)["lease_id"]
                assert ask(daemon, "DELETE", f"/v1/leases/{lease_id}", token=token)[0] == 200


@contextmanager
def rest_worker(daemon: Serving) -> Iterator[str]:
    """Attach over REST, and give the token."""
    status, attached = ask(daemon, "POST", "/v1/caches/shared/workers", {"tenant": "other"})
    assert status == 200, attached
    token: str = json.loads(attached)["token"]
    try:
        yield token
    finally:
        assert ask(daemon, "DELETE", "/v1/workers/self", token=token)[0] == 200


def reserve(
    daemon: Serving, token: str, request_id: str, num_tokens: int, wait_ms: int = 0
) -> tuple[int, str]:
    """Reserve over REST; returns status and body."""
    body = {"request_id": request_id, "num_tokens": num_tokens, "wait_ms": wait_ms}
    return ask(daemon, "POST", "/v1/leases", body, token)


def shown_problem() -> object:
    """Return the problem document that the docs show."""
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    return json.loads(page.split("```json\n")[1].split("```")[0])
