"""Laws of TLS: real certificates, both protocols, roles by certificate or token, no plain text on a network."""

import asyncio
import contextlib
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvlease import (
    AsyncClient,
    Client,
    Credentials,
    InvalidError,
    NotYoursError,
    UnavailableError,
    UnknownWorkerError,
)
from kvleased.access import tokens
from kvleased.access.roles import Role
from kvleased.config.settings import Settings
from kvleased.credentials.tls import TlsFiles, expires_at, role_in, role_of_name
from kvleased.system.directories import UnusableError
from tests.unit.api.certificates import Authority
from tests.unit.api.guarded import Guarded, guarded


@pytest.fixture(scope="module")
def authority() -> Any:
    """An authority that signs certificates."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        yield Authority(Path(directory))


@contextlib.asynccontextmanager
async def serving(authority: Authority, **changes: Any) -> AsyncIterator[Guarded]:
    """Serve with TLS."""
    pair = await asyncio.to_thread(authority.sign, "server")
    files = {"tls_cert_file": pair.cert_file, "tls_key_file": pair.key_file}
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        async with guarded(Path(directory) / "run", **(files | changes)) as found:
            yield found


def addresses(found: Guarded) -> list[str]:
    """Return the addresses with TLS."""
    return [
        f"https://127.0.0.1:{found.rest.http_port}",
        f"grpcs://127.0.0.1:{found.grpc.grpc_port}",
    ]


def epoch(address: str, credentials: Credentials) -> int:
    """Ask for something that is not open to everybody."""
    with Client(address, credentials=credentials, deadline_seconds=10) as client:
        return client.stats().epoch


async def test_tokens_go_over_tls(authority: Authority) -> None:
    """The clients of both protocols speak TLS, show a token, and have what the token's role permits."""
    ca_file = str(authority.cert_file)
    async with serving(authority) as found:
        reader = Credentials(ca_file=ca_file, token=found.tokens[Role.READER])
        for address in addresses(found):
            assert await asyncio.to_thread(epoch, address, reader) > 0
            async with AsyncClient(address, credentials=reader) as client:
                assert (await client.stats()).epoch > 0
                with pytest.raises(NotYoursError):
                    await client.delete_cache("main")
            with pytest.raises(UnknownWorkerError):
                await asyncio.to_thread(epoch, address, Credentials(ca_file=ca_file))


async def test_worker_attaches_over_tls(authority: Authority) -> None:
    """A joiner's token becomes a worker's; memory is handed over on the local socket only."""
    async with serving(authority) as found:
        joiner = Credentials(ca_file=str(authority.cert_file), token=found.tokens[Role.JOINER])
        for address in addresses(found):
            async with (
                AsyncClient(address, credentials=joiner, on_doubt="raise") as client,
                await client.attach("main", tenant="a") as worker,
            ):
                lease = await worker.reserve("r", num_tokens=4)
                assert len(lease.block_ids) == 1
                assert worker.device is None
                with pytest.raises(InvalidError, match="use the address of the local socket"):
                    _ = worker.tables


async def test_certificate_gives_a_role(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's certificate gives its role; without one there is no connection, and other names need tokens."""
    # No token of a daemon of this user is found.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    names = ("kvlease-reader", "kvlease-operator", "somebody")
    pairs = {name: await asyncio.to_thread(authority.sign, name) for name in names}
    ca_file = str(authority.cert_file)
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other").sign("kvlease-operator")
    foreign = Credentials(
        ca_file=ca_file, cert_file=str(other.cert_file), key_file=str(other.key_file)
    )
    async with serving(authority, tls_client_ca_file=authority.cert_file) as found:
        for address in addresses(found):
            shown = {
                name: Credentials(
                    ca_file=ca_file, cert_file=str(pair.cert_file), key_file=str(pair.key_file)
                )
                for name, pair in pairs.items()
            }
            assert await asyncio.to_thread(epoch, address, shown["kvlease-reader"]) > 0
            assert await asyncio.to_thread(epoch, address, shown["kvlease-operator"]) > 0
            with pytest.raises(UnknownWorkerError):
                await asyncio.to_thread(epoch, address, shown["somebody"])
            with pytest.raises(UnavailableError, match="KVLEASE_CERT_FILE"):
                await asyncio.to_thread(epoch, address, Credentials(ca_file=ca_file))
            with pytest.raises(UnavailableError, match=r"is valid now, and of the authority that"):
                await asyncio.to_thread(epoch, address, foreign)


async def test_client_trusts_nobody_else(authority: Authority) -> None:
    """A client does not talk to a daemon whose certificate comes from another authority."""
    async with serving(authority) as found:
        for address in addresses(found):
            with pytest.raises(UnavailableError):
                await asyncio.to_thread(
                    epoch, address, Credentials(token=found.tokens[Role.READER])
                )


async def test_certificate_that_is_not_taken_is_told_with_what_to_name(
    authority: Authority,
) -> None:
    """A client without the authority's file is told to name it, and not to look whether the daemon runs."""
    async with serving(authority) as found:
        address, nobody = addresses(found)[0], Credentials(token=found.tokens[Role.READER])
        with pytest.raises(UnavailableError, match=r"certificate of https.*KVLEASE_CA_FILE"):
            await asyncio.to_thread(epoch, address, nobody)
        async with AsyncClient(address, credentials=nobody, deadline_seconds=10) as client:
            with pytest.raises(UnavailableError, match=r"certificate of https.*KVLEASE_CA_FILE"):
                await client.stats()


@pytest.mark.parametrize(
    ("wrong", "reason", "advice"),
    [
        (
            "authority",
            "unable to get local issuer certificate",
            "set KVLEASE_CA_FILE to the certificate file",
        ),
        ("time", "certificate has expired", "renew the daemon's certificate, or"),
        ("host", "(IP address mismatch|Hostname)[^)]*", "use a host that the certificate names"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 1], ids=["rest", "grpc"])
async def test_certificate_is_refused_with_what_is_wrong_about_it(
    authority: Authority, tmp_path: Path, wrong: str, reason: str, advice: str, protocol: int
) -> None:
    """Either client over either protocol says if a certificate has another authority, date or host, with its remedy."""
    changes: dict[str, Any] = {"tcp_host": "127.0.0.2" if wrong == "host" else "127.0.0.1"}
    trusted = authority
    if wrong == "authority":
        trusted = await asyncio.to_thread(Authority, tmp_path, "other")
    if wrong == "time":
        past = await asyncio.to_thread(authority.sign_between, "past", -2, -1)
        changes |= {"tls_cert_file": past.cert_file, "tls_key_file": past.key_file}
    async with serving(authority, **changes) as found:
        address = addresses(found)[protocol].replace("127.0.0.1", changes["tcp_host"])
        shown = Credentials(ca_file=str(trusted.cert_file), token=found.tokens[Role.READER])
        words = rf"^the certificate of {address} was not accepted \({reason}\); .*{advice}"
        with pytest.raises(UnavailableError, match=words):
            await asyncio.to_thread(epoch, address, shown)
        async with AsyncClient(address, credentials=shown, deadline_seconds=10) as client:
            with pytest.raises(UnavailableError, match=words):
                await client.stats()


async def test_client_with_tls_of_a_daemon_without_is_told_of_the_plain_scheme(
    tmp_path: Path,
) -> None:
    """A client with an s too many in the address is told the plain address, over either protocol."""
    async with guarded(tmp_path / "run") as found:
        for address in addresses(found):
            plain = f"is at {address.split(':')[0][:-1]}://"
            async with AsyncClient(address) as client:
                with pytest.raises(UnavailableError, match=plain):
                    await client.stats()
            with pytest.raises(UnavailableError, match=plain):
                await asyncio.to_thread(epoch, address, Credentials())


async def test_plain_client_of_a_daemon_with_tls_is_told_the_scheme(authority: Authority) -> None:
    """A client that uses http:// or grpc:// at a port of TLS is told so, over either protocol."""
    async with serving(authority) as found:
        shown = Credentials(token=found.tokens[Role.READER])
        for secure in addresses(found):
            scheme, _, place = secure.partition("://")
            address = f"{scheme.removesuffix('s')}://{place}"
            with pytest.raises(UnavailableError, match=f"is at {scheme}://"):
                await asyncio.to_thread(epoch, address, shown)
            async with AsyncClient(address, credentials=shown, deadline_seconds=10) as client:
                with pytest.raises(UnavailableError, match=f"is at {scheme}://"):
                    await client.stats()


async def test_plain_text_and_old_tls_are_not_spoken(authority: Authority) -> None:
    """A client that speaks HTTP or an old TLS to the port of HTTPS is cut off."""
    async with serving(authority) as found:
        reader, writer = await asyncio.open_connection("127.0.0.1", found.rest.http_port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(10):
            said = await reader.read()
        writer.close()
        assert b"HTTP" not in said

        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        _, good = await asyncio.open_connection("127.0.0.1", found.rest.http_port, ssl=old)
        good.close()


async def test_handshake_that_does_not_come_is_given_up(authority: Authority) -> None:
    """A connection on which no handshake begins is counted, and closed in time."""
    async with serving(authority, head_seconds_max=0.2) as found:
        reader, writer = await asyncio.open_connection("127.0.0.1", found.rest.http_port)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        async with asyncio.timeout(10):
            while found.rest._servers[1].num_connections:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0.01)


def test_names_of_certificates_are_exact() -> None:
    """A certificate gives a role by its exact name only, and never makes an attached worker."""
    assert role_of_name("kvlease-joiner") is Role.JOINER
    for name in ("kvlease-worker", "operator", "kvlease-operator ", "KVLEASE-OPERATOR", ""):
        assert role_of_name(name) is Role.STRANGER
    assert role_in({"subject": ((("organizationName", "kvlease-operator"),),)}) is Role.STRANGER


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::"])  # noqa: S104 -- what is refused
def test_tcp_beyond_loopback_needs_tls(host: str, authority: Authority) -> None:
    """Without TLS the daemon does not start on such an address, unless a setting accepts the risk."""
    pair = authority.sign("beyond")
    with pytest.raises(ValueError, match="which other machines can reach"):
        Settings(tcp_host=host)

    Settings(tcp_host=host, tls_cert_file=pair.cert_file, tls_key_file=pair.key_file)
    Settings(tcp_host=host, insecure_tcp_without_tls=True)
    Settings(tcp_host=host, listen_tcp=False)


@pytest.mark.parametrize(
    "changes", [{"tls_cert_file": "/c"}, {"tls_key_file": "/k"}, {"tls_client_ca_file": "/a"}]
)
def test_files_of_tls_go_together(changes: dict[str, Path]) -> None:
    """Half of the files that TLS needs are refused."""
    with pytest.raises(ValueError, match="tls_"):
        Settings(**changes)


def test_files_that_do_not_fit_are_refused(authority: Authority, tmp_path: Path) -> None:
    """A file that does not fit is refused by name at the start."""
    one, other = authority.sign("one"), authority.sign("other")
    for cert, key in ((one.cert_file, other.key_file), (tmp_path / "none", one.key_file)):
        with pytest.raises(UnusableError, match=cert.name):
            TlsFiles(cert_file=cert, key_file=key, client_ca_file=None).context()


@pytest.mark.parametrize("role", ["cert_file", "key_file", "client_ca_file"])
@pytest.mark.parametrize("text", [None, "no certificate"])
def test_file_that_cannot_be_used_is_the_one_named(
    authority: Authority, tmp_path: Path, role: str, text: str | None
) -> None:
    """The refusal of a missing file names it alone, and that of an authority not the certificate."""
    made, file = authority.sign("named"), tmp_path / "wrong.pem"
    if text is not None:
        file.write_text(text)
    files = {
        "cert_file": made.cert_file,
        "key_file": made.key_file,
        "client_ca_file": authority.cert_file,
    }

    with pytest.raises(UnusableError, match=f"{file}: |{file} and |and {file}") as refused:
        TlsFiles(**(files | {role: file})).context()

    is_alone = text is None or role == "client_ca_file"
    assert is_alone is not (" and " in str(refused.value))


def test_encrypted_key_is_refused_and_asks_nobody(authority: Authority, tmp_path: Path) -> None:
    """A key with a pass phrase is refused with what to write instead; OpenSSL would wait for someone to type it."""
    made, encrypted = authority.sign("encrypted"), tmp_path / "encrypted.key"
    command = [
        "openssl",
        "pkey",
        "-in",
        made.key_file,
        "-out",
        encrypted,
        "-aes128",
        "-passout",
        "pass:phrase",
    ]
    subprocess.run(command, check=True, capture_output=True)

    with pytest.raises(UnusableError, match=r"encrypted\.key: the key is encrypted.*openssl pkey"):
        TlsFiles(cert_file=made.cert_file, key_file=encrypted, client_ca_file=None).context()
    shown = Credentials(cert_file=str(made.cert_file), key_file=str(encrypted))
    for read in (shown.tls, shown.pem):
        with pytest.raises(
            InvalidError, match=r"encrypted\.key.*the key is encrypted.*openssl pkey"
        ):
            read()


def _write(path: Path, text: str, mode: int) -> None:
    path.write_text(text)
    path.chmod(mode)


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        pytest.param("a" * 32, 0o644, "other users can read", id="readable"),
        pytest.param("a" * 32, 0o620, "other users can read or write", id="writable by the group"),
        pytest.param("short", 0o600, "16 to 512", id="short"),
        pytest.param("a" * 600, 0o600, "16 to 512", id="long"),
        pytest.param("a b" * 16, 0o600, "without spaces", id="space"),
        pytest.param("é" * 32, 0o600, "ASCII", id="not ASCII"),
    ],
)
def test_token_file_that_is_none_is_refused(
    tmp_path: Path, text: str, mode: int, reason: str
) -> None:
    """A token that others can read or guess is refused, and is not repeated."""
    path = tmp_path / "operator.token"
    _write(path, text, mode)

    with pytest.raises(UnusableError, match=reason) as refused:
        tokens.ensure({Role.OPERATOR: path})

    assert text not in str(refused.value)


def test_token_files_of_a_mounted_secret_are_taken(tmp_path: Path) -> None:
    """A link to a file that the group may read, as Kubernetes mounts it, is taken; two roles have different tokens."""
    _write(tmp_path / "data", "k" * 40 + "\n", 0o440)
    (tmp_path / "a").symlink_to("data")
    keyring = tokens.ensure({Role.READER: tmp_path / "a"})

    assert keyring.role_of("k" * 40) is Role.READER
    assert keyring.role_of("k" * 39) is keyring.role_of("") is Role.STRANGER
    assert "k" * 8 not in repr(keyring)
    with pytest.raises(UnusableError, match="the same token"):
        tokens.ensure({Role.READER: tmp_path / "a", Role.OPERATOR: tmp_path / "data"})


@pytest.mark.parametrize("year", ["2031", "2061"])
def test_end_of_a_certificate_is_read(authority: Authority, tmp_path: Path, year: str) -> None:
    """The end is exactly what openssl gives for a chain's first certificate, with two or four digits of the year."""
    chain = tmp_path / "chain.pem"
    leaf, moment = tmp_path / "leaf.pem", f"{year}0203040506Z"
    made = authority.sign("ends")
    command = ["openssl", "x509", "-in", str(made.cert_file), "-signkey", str(made.key_file)]
    days = (datetime.strptime(moment, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC) - datetime.now(UTC)).days
    subprocess.run(
        [*command, "-days", str(days), "-out", str(leaf)], check=True, capture_output=True
    )
    chain.write_text(f"Some words before it.\n{leaf.read_text()}{authority.cert_file.read_text()}")

    asked = ["openssl", "x509", "-in", str(leaf), "-noout", "-enddate"]
    told = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()

    assert expires_at(chain) == ssl.cert_time_to_seconds(told.removeprefix("notAfter="))


@pytest.mark.parametrize(
    "text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_end_of_what_is_no_certificate_is_unknown(tmp_path: Path, text: str) -> None:
    """A file without a certificate, or no file, gives no end, and is no failure."""
    (tmp_path / "cert.pem").write_text(text)

    assert expires_at(tmp_path / "cert.pem") is None
    assert expires_at(tmp_path / "nowhere.pem") is None
