"""Callers with a token, connected or new, are served over gRPC however many strangers hold connections."""

import re
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1.kvlease_pb2_grpc import KVLeaseServiceStub
from kvleased.api.grpc.connections import STRANGERS_MAX
from tests.acceptance.serving import ROOT, Serving, told_in
from tests.unit.api.certificates import Authority

pytestmark = pytest.mark.acceptance

NUM_STRANGERS = 2_000
MEMBERS_MAX = 64
NUM_NEWCOMERS = 25
TRIES_MAX = 3
SECONDS = 60


@pytest.mark.parametrize(
    "is_plain",
    [pytest.param(True, id="plain"), pytest.param(False, id="TLS", marks=pytest.mark.thorough)],
)
def test_strangers_hold_off_nobody_over_grpc(tmp_path: Path, is_plain: bool) -> None:
    """Two thousand strangers, who reconnect when hung up on, end no member's stream and keep no token holder out."""
    options = ["--listen-tcp", "--http-port", "0", "--grpc-port", "0"]
    options += [
        "--max-connections",
        str(MEMBERS_MAX),
        "--probe-host",
        "127.0.0.1",
        "--probe-port",
        "0",
    ]
    trusted = b""
    if not is_plain:
        authority = Authority(tmp_path)
        pair = authority.sign("localhost")
        options += ["--tls-cert-file", str(pair.cert_file), "--tls-key-file", str(pair.key_file)]
        trusted = authority.cert_file.read_bytes()
    serving = Serving(tmp_path / "run", *options)
    try:
        serving.wait_until_ready()
        log = Path(serving.log.name)
        port, metrics_at = _said(log)
        token = (serving.runtime_dir / "operator.token").read_text().strip()
        told = [("authorization", f"Bearer {token}")]
        with _channel(port, trusted) as channel:
            member = KVLeaseServiceStub(channel)
            watch = member.Watch(pb.WatchRequest(), metadata=told)
            member.ListCaches(pb.ListCachesRequest(), metadata=told, timeout=SECONDS)
            with _crowd(port, is_tls=not is_plain):
                for _ in range(NUM_NEWCOMERS):
                    with _channel(port, trusted) as new:
                        _ask(KVLeaseServiceStub(new), told)
                    member.ListCaches(pb.ListCachesRequest(), metadata=told, timeout=SECONDS)
                metrics = _read(metrics_at)
            assert watch.is_active()
            watch.cancel()
        records = told_in(log)
    finally:
        serving.stop()

    turned_away = 'kvlease_connections_turned_away_total{listener="grpc_tcp",who="%s"}'
    assert _value(metrics, turned_away % "stranger") > 0
    assert _value(metrics, turned_away % "member") == 0
    assert _value(metrics, 'kvlease_stranger_connections{listener="grpc_tcp"}') <= STRANGERS_MAX
    assert 1 <= _value(metrics, 'kvlease_connections{listener="grpc_tcp"}') <= MEMBERS_MAX
    told_of = [one["who"] for one in records if one["event"] == "connections_turned_away"]
    assert set(told_of) == {"stranger"}
    assert len(records) < 60


def _ask(newcomer: KVLeaseServiceStub, told: list[tuple[str, str]]) -> None:
    """Call for the first time; retry when pushed out as a stranger, before the token was shown."""
    for tries_left in reversed(range(TRIES_MAX)):
        try:
            newcomer.ListCaches(
                pb.ListCachesRequest(), metadata=told, timeout=SECONDS, wait_for_ready=True
            )
        except grpc.RpcError as error:
            if not tries_left or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        else:
            return


def _channel(port: int, trusted: bytes) -> grpc.Channel:
    """Return a channel with a connection of its own."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]
    address = f"localhost:{port}" if trusted else f"127.0.0.1:{port}"
    if trusted:
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted), options)
    return grpc.insecure_channel(address, options)


@contextmanager
def _crowd(port: int, *, is_tls: bool) -> Iterator[None]:
    """Have strangers hold connections, and wait until each of them has had one."""
    command = [sys.executable, "-m", "tests.acceptance.crowd", str(port), str(NUM_STRANGERS)]
    command += ["--tls"] if is_tls else []
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as crowd:
        try:
            assert crowd.stdout is not None
            assert crowd.stdout.readline() == "READY\n"
            yield
            num_opened = int(crowd.communicate(timeout=SECONDS)[0])
            assert num_opened > NUM_STRANGERS
        finally:
            crowd.kill()


def _said(log: Path) -> tuple[int, str]:
    """Return gRPC's port and the public address of the metrics, as the daemon's "ready" event names them."""
    events = {one["event"]: one for one in told_in(log)}
    probes = urllib.parse.urljoin(events["ready"]["probes"], "/metrics")
    return int(events["grpc_ready"]["tcp"].rpartition(":")[2]), probes


def _read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=SECONDS) as answer:  # noqa: S310 -- loopback
        return str(answer.read().decode())


def _value(metrics: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, name
    return float(found[1])
