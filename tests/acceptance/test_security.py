"""The gate of security: laws that hold of a daemon by default, over real processes and sockets.

`tests/unit/api/test_roles.py` tests which role may do what, `test_tls.py` beside it TLS, and
`tests/deploy/test_hostile.py` ten thousand hostile requests; docs/security.md says which test proves which promise.
"""

import ast
import contextlib
import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvlease import Client, KVLeaseError, PlanInputs, Worker
from kvlease.spec import FullAttention
from tests.acceptance.serving import ROOT, Serving, pool_of, told_in
from tests.unit.api.certificates import Authority

pytestmark = pytest.mark.acceptance

NUM_BLOCKS = 16
TOKENS_PER_BLOCK = 16
CANARY_TOKEN = 1_234_567_891
"""A token id that must appear in no log, metric or event."""
CANARY_REQUEST = "canary-request-of-a-customer"
CANARY_BYTE = 0xA5
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""Loopback addresses of both families, as the kernel writes them."""
LISTENS = "0A"


class Traced(Serving):
    """A daemon whose outgoing connections are recorded if strace is installed."""

    def start(self) -> None:
        """Start the daemon with its default listeners and a disk store."""
        self.trace = self.runtime_dir.parent / "connects"
        self.log = (self.runtime_dir.parent / "log").open("w+")
        self.disk_dir = self.runtime_dir.parent / "disk"
        self.disk_dir.mkdir(mode=0o700)
        command = [
            sys.executable,
            "-m",
            "kvleased",
            "serve",
            "--runtime-dir",
            str(self.runtime_dir),
        ]
        command += ["--http-port", "0", "--grpc-port", "0", "--log-level", "debug"]
        command += ["--disk-dir", str(self.disk_dir), "--drain-seconds", "0.1"]
        if strace := shutil.which("strace"):
            # -D: the daemon is our child, not strace's.
            tracing = [
                "-D",
                "-f",
                "--seccomp-bpf",
                "-qq",
                "-e",
                "trace=connect",
                "-o",
                str(self.trace),
            ]
            command = [strace, *tracing, *command]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=self.log, stderr=subprocess.STDOUT
        )

    def http(self) -> str:
        """Return the address of REST on TCP."""
        return str(self.said("rest_on_tcp"))

    def said(self, name: str) -> object:
        """Return a field of the daemon's "ready" event."""
        ready: dict[str, object] = next(
            one for one in told_in(Path(self.log.name)) if one["event"] == "ready"
        )
        return ready[name]

    def pids(self) -> set[int]:
        """Return the processes of the daemon."""
        found, left = set(), [self.process.pid]
        while left:
            pid = left.pop()
            found.add(pid)
            for task in Path(f"/proc/{pid}/task").iterdir():
                # A process may end during the look.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    left += map(int, (task / "children").read_text().split())
        return found


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """Run a daemon, and register a cache."""
    made = Traced(tmp_path_factory.mktemp("gate") / "run")
    try:
        made.wait_until_ready()
        layers = [FullAttention(name="l", num_kv_heads=2, head_size=16, dtype="float16")]
        inputs = PlanInputs(
            layers=layers,
            tokens_per_block=TOKENS_PER_BLOCK,
            device_blocks=NUM_BLOCKS,
            host_bytes=1 << 20,
            disk_bytes=1 << 20,
        )
        with Client(made.address("unix")) as client:
            client.register("main", inputs)
            made.until(lambda: client.get_cache("main").status == "ready")
        yield made
    finally:
        made.stop()


def attached(serving: Traced, tenant: str, scheme: str = "unix") -> Worker:
    """Attach a worker of a tenant."""
    with Client(serving.address(scheme), on_doubt="raise") as client:
        return client.attach("main", tenant=tenant)


def chain(worker: Worker, num_blocks: int) -> bytes:
    """Return the keys of a prompt of canary tokens for the worker's tenant."""
    tokens = np.full(num_blocks * TOKENS_PER_BLOCK, CANARY_TOKEN, np.int32)
    return worker.keys.chain(tokens, TOKENS_PER_BLOCK)


def computed(worker: Worker, num_blocks: int, request: str = CANARY_REQUEST) -> bytes:
    """Commit so many blocks full of canary bytes, and return their keys."""
    keys = chain(worker, num_blocks)
    num_tokens = num_blocks * TOKENS_PER_BLOCK
    with worker.reserve(request, keys=keys, num_tokens=num_tokens, wait_ms=20_000) as lease:
        pool_of(worker)[lease.block_ids] = CANARY_BYTE
        lease.commit(num_blocks * TOKENS_PER_BLOCK, keys)
    return keys


def test_nothing_listens_but_private_sockets_and_loopback(serving: Traced) -> None:
    """Sockets are files of mode 0600 in a directory of mode 0700; TCP is loopback, and there is no UDP."""
    inodes = _socket_inodes(serving.pids())
    listening = [
        row
        for name in ("tcp", "tcp6")
        for row in _net(name)
        if row[9] in inodes and row[3] == LISTENS
    ]
    udp = [row for name in ("udp", "udp6") for row in _net(name) if row[9] in inodes]
    sockets = [one for one in serving.runtime_dir.iterdir() if stat.S_ISSOCK(one.lstat().st_mode)]

    assert len(listening) == 2
    assert all(row[1].partition(":")[0] in LOOPBACK for row in listening)
    assert udp == []
    assert len(sockets) == 3
    assert {one.lstat().st_mode & 0o777 for one in sockets} == {0o600}
    assert serving.runtime_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_cannot_connect(serving: Traced) -> None:
    """Another user cannot reach the sockets."""
    program = (
        "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for path in sys.argv[1:]:\n"
        "    try: socket.socket(socket.AF_UNIX).connect(path)\n"
        "    except PermissionError: print('refused')\n"
    )
    paths = [str(serving.runtime_dir / name) for name in ("kvlease.sock", "http.sock", "grpc.sock")]
    command = [sys.executable, "-S", "-c", program, *paths]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    assert run.stdout.split() == ["refused"] * 3


@pytest.mark.parametrize(
    "path", ["/v1/stats", "/v1/caches", "/metrics", "/ui/data/live", "/v1/events"]
)
def test_stranger_on_loopback_learns_nothing(serving: Traced, path: str) -> None:
    """A caller on loopback without a token learns nothing, because any user of the machine can connect there."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(serving.http() + path, timeout=20)  # noqa: S310 -- loopback

    assert refused.value.code == 401
    refused.value.close()


def test_client_of_the_same_user_finds_its_token(
    serving: Traced, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A client on loopback shows the daemon's token file to that daemon alone, and to no other listener."""
    (tmp_path / "kvlease").symlink_to(serving.runtime_dir)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVLEASE_TOKEN_FILE", raising=False)

    with Client(serving.http(), on_doubt="raise") as client:
        assert client.stats("main").caches[0].cache == "main"
    monkeypatch.setattr("kvlease.credentials._is_own", lambda _: False)
    with (
        Client(serving.http(), on_doubt="raise") as client,
        pytest.raises(KVLeaseError, match="token"),
    ):
        client.stats("main")


def test_nothing_unpickles() -> None:
    """No module of ours uses what turns bytes into code, and all of them load where that is booby-trapped."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    for path in [*(ROOT / "client").rglob("*.py"), *(ROOT / "service").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            names |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            assert not {name.partition(".")[0] for name in names} & forbidden, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "yaml.load", "np.load"), path
    command = [sys.executable, "-c", _TRAPPED]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 150


def test_tenants_do_not_reach_each_other(serving: Traced) -> None:
    """A tenant with another's keys, lease and pin finds, holds, moves, ends and reads nothing of it."""
    with attached(serving, "a") as a, attached(serving, "b") as b:
        keys = computed(a, 2)
        pinned = a.pin(keys)
        lease = a.reserve("running", keys=keys, num_tokens=3 * TOKENS_PER_BLOCK, wait_ms=20_000)
        token = b._session.link.token

        assert chain(b, 2) != keys
        assert b.lookup(keys).hit_tokens == b.lookup(chain(b, 2)).hit_tokens == 0
        with b.reserve(
            "theft", keys=keys, num_tokens=2 * TOKENS_PER_BLOCK, wait_ms=20_000
        ) as stolen:
            assert stolen.hit_tokens == 0
            assert not np.isin(stolen.block_ids, lease.block_ids).any()
            assert not (pool_of(b)[stolen.block_ids] == CANARY_BYTE).any()
        assert b.pin(keys).num_blocks == 0
        assert b.evict(keys=keys).num_evicted == b.reload(keys=keys).num_reloaded == 0
        assert _asked(serving, "DELETE", f"/v1/pins/{pinned.pin_id}", token)["released"] is False
        for method, path, body in _ACTS_ON_A_LEASE:
            answer = _asked(serving, method, path.format(lease_id=lease.lease_id), token, body)
            assert answer["code"] in ("NOT_YOURS", "UNKNOWN_LEASE"), path
        assert lease.is_live
        assert a.lookup(keys).hit_tokens == 2 * TOKENS_PER_BLOCK
        a.unpin(pinned.pin_id)
        lease.release()


def test_token_of_a_worker_makes_no_other_worker(serving: Traced) -> None:
    """A token of a worker lets nobody attach for another tenant or register a cache."""
    with attached(serving, "a") as a:
        token = a._session.link.token
        for method, path, body in (
            ("POST", "/v1/caches/main/workers", {"tenant": "b"}),
            ("POST", "/v1/caches/main/workers", {"resume_token": token}),
            ("PUT", "/v1/caches/another", {"inputs": {"tokens_per_block": 16}}),
            ("POST", "/v1/plans", {"inputs": {"tokens_per_block": 16}}),
        ):
            answer = _asked(serving, method, path, token, body)
            assert (answer["status"], answer["code"], answer.get("rule")) == (
                403,
                "NOT_YOURS",
                "role",
            )
            assert answer["title"] == "It is another worker's, or not for the caller's role."


def test_tenants_do_not_see_each_other(serving: Traced) -> None:
    """A worker's lists show its own tenant's workers, leases, pins and figures, and no others."""
    with attached(serving, "a") as a, attached(serving, "b") as b:
        keys = computed(a, 2)
        pinned = a.pin(keys)
        with a.reserve("running", keys=keys, num_tokens=3 * TOKENS_PER_BLOCK, wait_ms=20_000):
            token = b._session.link.token
            seen = {
                what: _asked(serving, "GET", f"/v1/caches/main/{what}", token)
                for what in ("workers", "leases", "pins", "waiting", "tenants", "magazines")
            }

            assert [one["tenant"] for one in seen["workers"]["workers"]] == ["b"]
            assert {one["tenant"] for one in seen["tenants"].get("tenants", [])} <= {"b"}
            assert all(
                not seen[what].get(what) for what in ("leases", "pins", "waiting", "magazines")
            )
            assert all(not seen[what].get("num_total") for what in ("leases", "pins"))
        a.unpin(pinned.pin_id)


def test_granted_block_holds_no_foreign_byte(serving: Traced) -> None:
    """Blocks are zeroed before another tenant is granted them."""
    with attached(serving, "a") as a:
        for turn in range(3):
            computed(a, NUM_BLOCKS - 2, f"{CANARY_REQUEST}-{turn}")
    with attached(serving, "c") as c:
        wanted = (NUM_BLOCKS - 1) * TOKENS_PER_BLOCK
        with c.reserve("all", num_tokens=wanted, wait_ms=20_000) as lease:
            assert len(lease.block_ids) == NUM_BLOCKS - 1
            assert not pool_of(c)[lease.block_ids].any()


def test_all_files_are_private(serving: Traced) -> None:
    """All files that the daemon makes are accessible to its user alone."""
    with attached(serving, "a") as a:
        computed(a, 4)
        a.evict(num_blocks=4)
    for directory in (serving.runtime_dir, serving.disk_dir):
        for path in (directory, *directory.rglob("*")):
            assert path.lstat().st_mode & 0o077 == 0, path


def test_secrets_are_in_no_log_metric_or_event(serving: Traced) -> None:
    """Prompt tokens, request ids, block keys and bearer tokens appear in no log, metric or event."""
    events: list[str] = []
    with Client(serving.address("unix"), on_doubt="raise") as client:
        with attached(serving, "a") as worker, attached(serving, "b", "http+unix") as beside:
            keys = computed(worker, 2)
            for address in (serving.address("unix"), serving.address("http+unix")):
                _provoke(address, keys)
            canaries = [
                CANARY_REQUEST,
                str(CANARY_TOKEN),
                keys.hex(),
                keys[:32].hex(),
                worker._session.link.token,
                beside._session.link.token,
                *(path.read_text().strip() for path in serving.runtime_dir.glob("*.token")),
            ]
            lists = [
                str(client.inspect("main", what))
                for what in ("workers", "leases", "pins", "tenants")
            ]
        watching = threading.Thread(
            target=lambda: events.extend(map(str, client.watch(after_sequence=0, idle_seconds=2.0)))
        )
        watching.start()
        watching.join(60)
        stats = str(client.stats())
    operator = (serving.runtime_dir / "operator.token").read_text().strip()
    headers = {"Authorization": f"Bearer {operator}"}
    request = urllib.request.Request(serving.http() + "/metrics", headers=headers)  # noqa: S310 -- loopback
    with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310 -- the same
        metrics = answer.read().decode()
    log = Path(serving.log.name).read_text()

    assert events
    for name, text in (
        ("log", log),
        ("metrics", metrics),
        ("events", "".join(events)),
        ("lists", stats + "".join(lists)),
    ):
        assert text
        for canary in canaries:
            assert len(canary) >= 10
            assert canary not in text, name


def test_nothing_connects_out(serving: Traced) -> None:
    """No process of the daemon opens a connection; all TCP connections came in."""
    inodes = _socket_inodes(serving.pids())
    own = [row for name in ("tcp", "tcp6") for row in _net(name) if row[9] in inodes]

    assert all(row[1].partition(":")[0] in LOOPBACK for row in own)
    if serving.trace.exists():
        outgoing = [line for line in serving.trace.read_text().splitlines() if "AF_INET" in line]
        assert outgoing == []


@pytest.mark.parametrize(
    "is_plain",
    [
        pytest.param(True, id="plain"),
        pytest.param(False, id="TLS", marks=pytest.mark.thorough),
    ],
)
def test_flood_of_strangers_leaves_few_lines(tmp_path: Path, is_plain: bool) -> None:
    """Whatever is sent again and again, the log has at most one line per kind and listener in ten seconds."""
    options = ["--listen-tcp", "--http-port", "0", "--grpc-port", "0"]
    options += ["--probe-host", "127.0.0.1", "--probe-port", "0"]
    if not is_plain:
        pair = Authority(tmp_path).sign("localhost")
        options += ["--tls-cert-file", str(pair.cert_file), "--tls-key-file", str(pair.key_file)]
    serving = Serving(tmp_path / "run", *options)
    try:
        serving.wait_until_ready()
        log = Path(serving.log.name)
        found = {one["event"]: one for one in told_in(log)}
        addresses = [found["ready"]["rest_on_tcp"], found["ready"]["probes"]]
        for address in (*addresses, found["grpc_ready"]["tcp"]):
            for _ in range(50):
                _send(address, b"\0\r\n\r\n")
        _send(addresses[1], b"GET /livez HTTP/1.0\r\n\r\n")
        records = told_in(log)
    finally:
        serving.stop()

    told = [one for one in records if one["event"] == "bad_http"]
    assert len(told) <= 6
    assert {one["peer"].partition(":")[0] for one in told} == {"127.0.0.1"}
    assert len(records) < 40


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "TLS"])
def test_strangers_hold_off_nobody(tmp_path: Path, is_plain: bool) -> None:
    """While strangers hold all connections that they get, callers with tokens are served, and liveness answers."""
    options = ["--listen-tcp", "--http-port", "0", "--grpc-port", "0", "--max-connections", "16"]
    options += ["--probe-host", "127.0.0.1", "--probe-port", "0"]
    trusted = None
    if not is_plain:
        authority = Authority(tmp_path)
        pair = authority.sign("localhost")
        options += ["--tls-cert-file", str(pair.cert_file), "--tls-key-file", str(pair.key_file)]
        trusted = ssl.create_default_context(cafile=authority.cert_file)
    serving = Serving(tmp_path / "run", *options)
    try:
        serving.wait_until_ready()
        ready = {one["event"]: one for one in told_in(Path(serving.log.name))}["ready"]
        token = (serving.runtime_dir / "reader.token").read_text().strip()
        asked = urllib.request.Request(ready["rest_on_tcp"] + "/metrics")  # noqa: S310 -- loopback
        asked.add_header("Authorization", f"Bearer {token}")
        live = urllib.parse.urljoin(ready["probes"], "/livez")
        # A plain HTTP head would end a TLS handshake.
        said = [_PROBE if is_plain else b"", _PROBE]
        with (
            _held(ready["rest_on_tcp"], said[0]) as rest,
            _held(ready["probes"], said[1]) as probes,
        ):
            for _ in range(3):
                for line in (*rest, *probes):
                    with contextlib.suppress(OSError):
                        line.send(_PROBE if line in probes else said[0])
                with urllib.request.urlopen(asked, timeout=20, context=trusted) as answer:  # noqa: S310
                    metrics = answer.read().decode()
                with urllib.request.urlopen(live, timeout=20) as answer:  # noqa: S310
                    assert answer.status == 200
        log = told_in(Path(serving.log.name))
    finally:
        serving.stop()

    turned_away = 'kvlease_connections_turned_away_total{listener="rest_tcp",who="stranger"} '
    assert float(metrics.partition(turned_away)[2].split()[0]) > 0
    assert 'kvlease_connections{listener="rest_tcp"} 1.0' in metrics
    told = [one for one in log if one["event"] == "connections_turned_away"]
    assert {one["who"] for one in told} == {"stranger"}
    assert len(log) < 40


_PROBE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def _held(address: str, said: bytes) -> Iterator[list[socket.socket]]:
    """Hold more connections than there are places, each of which has sent one of these."""
    url = urllib.parse.urlsplit(address)
    with contextlib.ExitStack() as stack:
        lines = []
        for _ in range(200):
            line = socket.create_connection((url.hostname, url.port), timeout=20)
            lines.append(stack.enter_context(line))
            line.sendall(said)
        yield lines


def _send(address: str, sent: bytes) -> None:
    """Send bytes to a port, and wait for an answer or the end of the connection."""
    url = urllib.parse.urlsplit(address)
    assert url.hostname
    assert url.port
    with socket.create_connection((url.hostname, url.port), timeout=20) as line:
        line.sendall(sent)
        with contextlib.suppress(OSError):
            line.recv(4096)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104 -- what is refused
def test_tcp_without_tls_refuses_to_start(host: str, tmp_path: Path) -> None:
    """Beyond loopback a start needs TLS or an explicit setting that accepts the risk."""
    command = [
        sys.executable,
        "-m",
        "kvleased",
        "serve",
        "--runtime-dir",
        str(tmp_path / "run"),
        "--tcp-host",
        host,
    ]
    run = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert run.returncode == 2
    assert "--tls-cert-file" in run.stderr
    assert not (tmp_path / "run").exists()


_ACTS_ON_A_LEASE = (
    ("GET", "/v1/leases/{lease_id}/explanation", None),
    ("POST", "/v1/leases/{lease_id}/map", {}),
    ("POST", "/v1/leases/{lease_id}/extend", {"num_tokens": 64}),
    ("POST", "/v1/leases/{lease_id}/trim", {"num_tokens": 1}),
    ("POST", "/v1/leases/{lease_id}/fork", {"request_id": "f", "num_tokens": 16}),
    ("POST", "/v1/leases/{lease_id}/evict", {}),
    ("POST", "/v1/leases/{lease_id}/reload", {}),
    ("POST", "/v1/leases/{lease_id}/commit", {"num_tokens": 0, "first_block": 0}),
    ("DELETE", "/v1/leases/{lease_id}", None),
)
_TRAPPED = """
import importlib, pickle, pkgutil, sys, _pickle
def trapped(*_, **__): raise SystemExit("something was unpickled")
for module in (pickle, _pickle):
    module.loads = module.load = module.Unpickler = trapped
import kvlease, kvleased
count = 0
for package in (kvlease, kvleased):
    for one in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".integrations" in one.name or one.name.endswith("__main__"): continue
        importlib.import_module(one.name); count += 1
print(count)
"""


def _asked(
    serving: Traced, method: str, path: str, token: str, body: object = None
) -> dict[str, object]:
    """Send a request over TCP with a token; return the answer's document."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(serving.http() + path, data, headers, method=method)  # noqa: S310 -- loopback
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310 -- the same
            found: dict[str, object] = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            found = json.load(error)
    return found


def _provoke(address: str, keys: bytes) -> None:
    """Make every kind of mistake whose log line might contain what was sent."""
    with Client(address, on_doubt="raise") as client, client.attach("main", tenant="a") as worker:
        for mistake in (
            lambda: worker.reserve(CANARY_REQUEST * 9, keys=keys, num_tokens=32),
            lambda: worker.reserve(CANARY_REQUEST + "\n\x1b[31m", keys=keys, num_tokens=32),
            lambda: worker.reserve(CANARY_REQUEST, keys=keys, num_tokens=1 << 30),
            lambda: worker.reserve(CANARY_REQUEST, keys=keys[:-1], num_tokens=32),
        ):
            with pytest.raises(KVLeaseError):
                mistake()


def _socket_inodes(pids: set[int]) -> set[str]:
    found = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)  # noqa: PTH115 -- it is no path
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def _net(name: str) -> list[list[str]]:
    """Return the rows of one of the kernel's socket tables."""
    lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    return [line.split() for line in lines]
