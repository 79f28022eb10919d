"""Tokens and certificates change while the daemon runs, and leases go on."""

import http.client
import os
import pty
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvlease import Client, Credentials, KVLeaseError, PlanInputs, UnknownWorkerError
from kvlease.spec import FullAttention
from kvleased.credentials.tls import expires_at
from tests.acceptance.serving import ROOT, SECONDS_TO_START, Serving
from tests.unit.api.certificates import Authority, Pair

pytestmark = pytest.mark.acceptance
_EXPIRES_AT = "kvlease_certificate_expires_timestamp_seconds"


class Secured:
    """A daemon that speaks TLS, with its files and addresses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory)
        self.cert_file, self.key_file = directory / "tls.pem", directory / "tls.key"
        self.put(self.authority.sign("server"))
        options = ["--listen-tcp", "--http-port", "0", "--grpc-port", "0"]
        options += ["--tls-cert-file", str(self.cert_file), "--tls-key-file", str(self.key_file)]
        self.serving = Serving(directory / "run", *options)

    def put(self, pair: Pair) -> None:
        """Replace the daemon's certificate, key first, as a renewing program does."""
        for new, place in ((pair.key_file, self.key_file), (pair.cert_file, self.cert_file)):
            aside = place.with_suffix(".new")
            aside.write_bytes(new.read_bytes())
            aside.rename(place)

    def put_token(self, token: str) -> None:
        """Replace the reader's token."""
        aside = self.directory / "token"
        aside.touch(0o600)
        aside.write_text(token)
        aside.rename(self.token_file)

    @property
    def token_file(self) -> Path:
        """Return the path of the reader's token."""
        return self.serving.runtime_dir / "reader.token"

    @property
    def log(self) -> str:
        """Return the daemon's log."""
        return Path(self.serving.log.name).read_text()

    def addresses(self) -> tuple[str, str]:
        """Return the TCP addresses of REST and gRPC since the last start."""
        https, grpcs = (
            re.findall(rf"{scheme}://127.0.0.1:\d+", self.log)[-1] for scheme in ("https", "grpcs")
        )
        return https, grpcs

    def restart(self, num_starts: int) -> None:
        """Kill the control process, and wait until it serves after its `num_starts`-th start."""
        self.serving.kill_control()
        # gRPC serves last, at another port.
        for event in ("ready", "grpc_ready"):
            said = f'"event": "{event}"'
            self.serving.until(lambda said=said: self.log.count(said) == num_starts)  # type: ignore[misc]

    def hang_up(self) -> None:
        """Send the daemon a hangup, so that it reads its files now."""
        os.kill(self.serving.process.pid, signal.SIGHUP)

    def admits(self, address: str, token: str, authority: Authority) -> bool:
        """Tell whether a new connection lets in a reader with this token who trusts this authority."""
        shown = Credentials(token=token, ca_file=str(authority.cert_file))
        try:
            with Client(
                address, credentials=shown, on_doubt="raise", deadline_seconds=20
            ) as client:
                return client.stats().epoch > 0
        except KVLeaseError:
            return False

    @contextmanager
    def page(self, token: str) -> Iterator[http.client.HTTPResponse]:
        """Stream the page's data, as a browser with this token does."""
        port = int(self.addresses()[0].rpartition(":")[2])
        trusting = ssl.create_default_context(cafile=str(self.authority.cert_file))
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=trusting)
        connection.request("GET", "/ui/data/live", headers={"Authorization": f"Bearer {token}"})
        try:
            yield connection.getresponse()
        finally:
            connection.close()

    def metric(self, what: str) -> str:
        """Return the metric of stale credentials for one kind of them."""
        return self.sample(f'kvlease_credentials_stale{{what="{what}"}}')

    def sample(self, of_what: str) -> str:
        """Return the value of a metric."""
        connection = http.client.HTTPConnection("localhost", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.serving.runtime_dir / "http.sock"))
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        name = f"{of_what} "
        return next(line for line in text.splitlines() if line.startswith(name))[len(name) :]


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    """Run a daemon that speaks TLS, with a cache."""
    made = Secured(tmp_path)
    try:
        made.serving.wait_until_ready()
        made.serving.until(lambda: "grpcs://" in made.log)
        layers = [FullAttention(name="l", num_kv_heads=1, head_size=16, dtype="float16")]
        with Client(made.serving.address("unix")) as client:
            client.register("main", PlanInputs(layers=layers, tokens_per_block=16, device_blocks=8))
            made.serving.until(lambda: client.get_cache("main").status == "ready")
        yield made
    finally:
        made.serving.stop()


def test_tokens_are_taken_while_the_daemon_runs(secured: Secured) -> None:
    """By the next look at the files, a new token is let in and the old one is not, over REST and gRPC."""
    old = secured.token_file.read_text().strip()
    new = "0123456789abcdef0123456789abcdef"
    control = secured.serving.control()
    for address in secured.addresses():
        assert secured.admits(address, old, secured.authority)
        assert not secured.admits(address, new, secured.authority)

    secured.put_token(new)
    secured.serving.until(lambda: "credentials_taken" in secured.log)

    for address in secured.addresses():
        assert secured.admits(address, new, secured.authority)
        assert not secured.admits(address, old, secured.authority)
    assert secured.serving.control() == control


def test_streams_end_with_the_token_that_began_them(secured: Secured) -> None:
    """Once a token is replaced, its streams of events and of the page end."""
    shown = Credentials(
        token=secured.token_file.read_text().strip(), ca_file=str(secured.authority.cert_file)
    )
    with ExitStack() as stack:
        clients = [
            stack.enter_context(Client(address, credentials=shown, on_doubt="raise"))
            for address in secured.addresses()
        ]
        streams = [client.watch(with_snapshot=True, idle_seconds=20) for client in clients]
        assert [next(stream).kind for stream in streams] == ["snapshot", "snapshot"]
        page = stack.enter_context(secured.page(shown.token))
        assert page.readline() == b"event: figures\n"

        secured.put_token("0123456789abcdef0123456789abcdef")
        secured.serving.until(lambda: "credentials_taken" in secured.log)
        with Client(secured.serving.address("unix")) as client, client.attach("main"):
            for stream in streams:
                with pytest.raises(UnknownWorkerError, match="of a reader was replaced"):
                    next(stream)

        assert b"event: problem\n" in page.readlines()


@pytest.mark.thorough
def test_tokens_that_a_restart_cannot_use_leave_the_old_in_force(secured: Secured) -> None:
    """A control process that cannot use its tokens keeps the previous one's, and says which file to mend."""
    token = secured.token_file.read_text().strip()
    secured.token_file.write_text("short")

    for num_starts in (2, 3):
        secured.restart(num_starts)
        assert secured.metric("tokens") == "1.0"
        for address in secured.addresses():
            assert secured.admits(address, token, secured.authority)
            assert not secured.admits(address, "short", secured.authority)

    (line,) = [one for one in secured.log.splitlines() if "credentials_not_taken" in one][:1]
    assert str(secured.token_file) in line
    assert token not in secured.log
    assert "Traceback" not in secured.log
    new = "0123456789abcdef0123456789abcdef"
    secured.put_token(new)
    secured.serving.until(lambda: secured.metric("tokens") == "0.0")
    for address in secured.addresses():
        assert secured.admits(address, new, secured.authority)
        assert not secured.admits(address, token, secured.authority)


@pytest.mark.thorough
@pytest.mark.parametrize("lost", ["cert_file", "key_file"])
def test_certificate_that_a_restart_does_not_find_is_served_on(secured: Secured, lost: str) -> None:
    """A control process whose TLS files are gone serves with the previous one's, and leases go on."""
    token = secured.token_file.read_text().strip()
    secured.put(secured.authority.sign("renewed"))
    secured.hang_up()
    secured.serving.until(lambda: "credentials_taken" in secured.log)
    with (
        Client(secured.serving.address("unix"), deadline_seconds=60) as client,
        client.attach("main") as worker,
    ):
        lease = worker.reserve("before", num_tokens=16)
        getattr(secured, lost).unlink()

        for num_starts in (2, 3):
            secured.restart(num_starts)
            lease.extend(16 * num_starts)
            assert secured.metric("certificate") == "1.0"
            assert float(secured.sample(_EXPIRES_AT)) > 0
            for address in secured.addresses():
                assert secured.admits(address, token, secured.authority)

    assert "cannot_start" not in secured.log
    (secured.directory / "others").mkdir()
    other = Authority(secured.directory / "others", "other")
    secured.put(other.sign("mended"))
    secured.serving.until(lambda: secured.metric("certificate") == "0.0")
    for address in secured.addresses():
        assert secured.admits(address, token, other)
        assert not secured.admits(address, token, secured.authority)


def test_daemon_does_not_start_without_its_certificate(secured: Secured) -> None:
    """Kept copies end with the daemon: a new daemon says which file is missing."""
    secured.cert_file.unlink()
    secured.serving.process.terminate()
    assert secured.serving.process.wait(SECONDS_TO_START) == 0
    secured.serving.log.close()

    secured.serving.start()

    assert secured.serving.process.wait(SECONDS_TO_START) == 78
    assert str(secured.cert_file) in secured.log.splitlines()[-1]


def test_port_that_is_taken_is_named(tmp_path: Path) -> None:
    """A daemon with several ports names the one that is taken, and ends."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ["--listen-tcp", "--http-port", "0", "--grpc-port", str(port)]
        serving = Serving(tmp_path / "run", *options)
        assert serving.process.wait(SECONDS_TO_START) == 78
    told = Path(serving.log.name).read_text()
    serving.stop()

    (line,) = [one for one in told.splitlines() if "cannot_listen" in one]
    assert f'"address": "127.0.0.1:{port}"' in line
    assert "http_port" not in line
    assert '"event": "recovered"' not in told, "it is known before anything is brought back"


def test_token_that_cannot_be_used_leaves_the_old_in_force(secured: Secured) -> None:
    """An invalid token is reported in the log and by a metric, and the old token stays in force."""
    old = secured.token_file.read_text().strip()
    assert secured.metric("tokens") == "0.0"

    secured.put_token("short")
    secured.hang_up()
    secured.serving.until(lambda: "credentials_not_taken" in secured.log)

    for address in secured.addresses():
        assert secured.admits(address, old, secured.authority)
        assert not secured.admits(address, "short", secured.authority)
    assert secured.metric("tokens") == "1.0"
    secured.put_token(old)
    secured.hang_up()
    secured.serving.until(lambda: secured.metric("tokens") == "0.0")


def test_certificate_is_taken_while_the_daemon_runs(secured: Secured) -> None:
    """Connections after the change see the new certificate, over REST and gRPC, and leases go on."""
    token = secured.token_file.read_text().strip()
    (secured.directory / "others").mkdir()
    other = Authority(secured.directory / "others", "other")
    with (
        Client(secured.serving.address("unix"), on_doubt="raise") as client,
        client.attach("main") as worker,
    ):
        lease = worker.reserve("before", num_tokens=16)
        for address in secured.addresses():
            assert not secured.admits(address, token, other)

        before = float(secured.sample(_EXPIRES_AT))
        renewed = other.sign("renewed", days=30)
        secured.put(renewed)
        secured.hang_up()
        secured.serving.until(lambda: "credentials_taken" in secured.log)
        after = float(secured.sample(_EXPIRES_AT))
        assert before < after == expires_at(renewed.cert_file)

        for address in secured.addresses():
            secured.serving.until(lambda at=address: secured.admits(at, token, other))  # type: ignore[misc]
            assert not secured.admits(address, token, secured.authority)
        lease.extend(32)


@pytest.mark.parametrize(
    "broken",
    [
        "garbage",
        "ended",
        *(
            pytest.param(other, marks=pytest.mark.thorough)
            for other in ("key of another", "nothing", "not begun")
        ),
    ],
)
def test_certificate_that_cannot_be_used_leaves_the_old_in_force(
    secured: Secured, broken: str
) -> None:
    """A certificate that is invalid, fits no key, is missing or out of date is not taken, and the old one is served."""
    token = secured.token_file.read_text().strip()
    if broken == "garbage":
        secured.cert_file.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n")
    elif broken == "nothing":
        secured.cert_file.unlink()
    elif broken == "ended":
        secured.put(secured.authority.sign_between("old", -3, -1))
    elif broken == "not begun":
        secured.put(secured.authority.sign_between("early", 1, 3))
    else:
        secured.key_file.write_bytes(secured.authority.sign("another").key_file.read_bytes())

    secured.hang_up()
    secured.serving.until(lambda: secured.metric("certificate") == "1.0")

    assert "credentials_not_taken" in secured.log
    for address in secured.addresses():
        assert secured.admits(address, token, secured.authority)
    secured.put(secured.authority.sign("mended"))
    secured.hang_up()
    secured.serving.until(lambda: secured.metric("certificate") == "0.0")
    for address in secured.addresses():
        assert secured.admits(address, token, secured.authority)


@pytest.mark.thorough
def test_start_with_a_certificate_that_has_ended_is_told(secured: Secured) -> None:
    """A control process that finds only an ended certificate serves all the same, and says so."""
    token = secured.token_file.read_text().strip()
    secured.put(secured.authority.sign_between("old", -3, -1))
    secured.serving.kill_control()
    secured.serving.until(lambda: secured.log.count('"event": "ready"') == 2)

    assert '"event": "certificate_out_of_date"' in secured.log
    assert secured.metric("certificate") == "1.0"
    with Client(secured.serving.address("unix"), deadline_seconds=30) as client:
        assert client.get_cache("main").status == "ready"
    for address in secured.addresses():
        assert not secured.admits(address, token, secured.authority)

    secured.put(secured.authority.sign("mended"))
    secured.hang_up()
    secured.serving.until(lambda: secured.metric("certificate") == "0.0")
    for address in secured.addresses():
        secured.serving.until(lambda at=address: secured.admits(at, token, secured.authority))  # type: ignore[misc]


def test_terminal_that_hangs_up_ends_the_daemon(tmp_path: Path) -> None:
    """A daemon started by hand ends with its terminal; to any other a hangup is a hint to read its files."""
    ours, theirs = pty.openpty()
    (tmp_path / "run").mkdir(mode=0o700)
    command = [
        sys.executable,
        "-m",
        "kvleased",
        "serve",
        "--no-listen-tcp",
        "--drain-seconds",
        "0.1",
    ]
    command += ["--runtime-dir", str(tmp_path / "run")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdin=theirs, stdout=log, stderr=log, cwd=ROOT)
    os.close(theirs)
    try:
        with Client(f"unix://{tmp_path}/run/kvlease.sock", deadline_seconds=60) as client:
            wait_for(process, (tmp_path / "run" / "kvlease.sock").exists)
            client.stats()
        os.kill(process.pid, signal.SIGHUP)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def wait_for(process: "subprocess.Popen[bytes]", is_done: Callable[[], bool]) -> None:
    """Wait until the condition holds, for as long as the process lives."""
    end = time.monotonic() + SECONDS_TO_START
    while not is_done():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
