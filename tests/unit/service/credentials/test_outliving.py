"""Laws of copies of credentials: a control process that cannot use the files goes on with its predecessor's copies."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from kvleased.access.roles import Role
from kvleased.access.tokens import Keyring
from kvleased.config.settings import Settings
from kvleased.credentials.outliving import Copies, begin
from kvleased.credentials.renewing import Renewal
from kvleased.credentials.tls import TlsFiles, tls_files
from kvleased.supervision.keeper import Kept, Store
from kvleased.supervision.keeper_link import KeeperLink
from kvleased.system.directories import UnusableError
from tests.unit.api.certificates import Authority


class Lives:
    """The successive control processes of one supervisor, each of which begins with what the supervisor keeps."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = Store()
        self.renewal = Renewal()
        self.keyring = Keyring({})
        self.take_certificate: Callable[[TlsFiles], None] = lambda _: None

    def keep(self, name: str, fd: int, metadata: dict[str, str]) -> None:
        """Keep a descriptor, as the supervisor does for the link."""
        self.store.act({"op": "keep", "name": name, "metadata": metadata}, [os.dup(fd)])

    def kept(self) -> list[Kept]:
        """Return what the next control process is handed."""
        return [
            Kept(name=one["name"], fd=os.dup(fd), num_bytes=0, metadata={})
            for message, fds in self.store.handover()
            for one, fd in zip(message["entries"], fds, strict=True)
        ]

    def next(self) -> Settings:
        """Begin the next life; return the settings that it serves by."""
        self.renewal = Renewal()
        copies = Copies(cast(KeeperLink, self), self.kept())
        return begin(self.settings, copies, self.renewal, self._take, self.take_certificate)

    def _take(self, keyring: Keyring) -> None:
        self.keyring = keyring


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    """A supervisor whose daemon serves TLS to clients with certificates."""
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    return Lives(
        Settings(
            runtime_dir=tmp_path,
            listen_tcp=True,
            tls_cert_file=pair.cert_file,
            tls_key_file=pair.key_file,
            tls_client_ca_file=authority.cert_file,
        )
    )


def files_of(settings: Settings) -> TlsFiles:
    """Return the files that serve TLS."""
    found = tls_files(settings)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["tls_cert_file", "tls_key_file", "tls_client_ca_file"])
def test_file_of_tls_that_is_gone_has_a_copy(lives: Lives, name: str) -> None:
    """Any of the files may go: in the next two lives all files are served from their copies."""
    assert lives.next() is lives.settings
    before = {field: path.read_bytes() for field, path in vars_of(files_of(lives.settings)).items()}
    getattr(lives.settings, name).unlink()

    for _ in range(2):
        served = files_of(lives.next())
        served.context()
        assert {field: path.read_bytes() for field, path in vars_of(served).items()} == before
        assert lives.renewal.stale == {"tokens": False, "certificate": True}


def vars_of(files: TlsFiles) -> dict[str, Path]:
    """Return the paths by field."""
    assert files.client_ca_file is not None
    return {"cert": files.cert_file, "key": files.key_file, "client_ca": files.client_ca_file}


def test_token_that_cannot_be_used_has_a_copy(lives: Lives) -> None:
    """If a token cannot be used, all tokens stay those of the life before until the file is mended."""
    path = lives.settings.token_paths[Role.READER]
    lives.next()
    token = path.read_text().strip()
    path.write_text("short")

    lives.next()

    assert lives.keyring.role_of(token) is Role.READER
    assert lives.renewal.stale == {"tokens": True, "certificate": False}
    path.write_text("another-and-longer-token")
    lives.renewal.look()
    assert lives.keyring.role_of("another-and-longer-token") is Role.READER
    assert lives.renewal.stale == {"tokens": False, "certificate": False}


@pytest.mark.parametrize("is_token", [True, False], ids=["token", "certificate"])
def test_first_life_has_no_copies(lives: Lives, *, is_token: bool) -> None:
    """Without copies, a file that cannot be used is refused by its path."""
    path = lives.settings.token_paths[Role.READER] if is_token else lives.settings.tls_key_file
    assert path is not None
    path.touch(0o600)
    path.write_text("short")

    with pytest.raises(UnusableError, match=str(path)):
        lives.next()


def test_copies_show_no_secret(lives: Lives) -> None:
    """Names and representations of copies say what they are copies of, and show no secret."""
    lives.next()
    kept = lives.kept()
    told = f"{[one.entry for one in kept]} {Copies(cast(KeeperLink, lives), kept)}"

    assert told.endswith("<Copies of tokens, certificate>")
    assert lives.keyring.words[Role.READER.value] not in told
    assert "PRIVATE" not in told
    assert repr(Copies(cast(KeeperLink, lives), [])) == "<Copies of nothing>"


def test_file_that_goes_while_it_is_taken_ends_no_watch(lives: Lives) -> None:
    """A server that finds a file gone, which was there a moment before, is served by the next look."""
    gone: list[OSError] = [FileNotFoundError("gone")]

    def take(_: TlsFiles) -> None:
        if gone:
            raise gone.pop()

    lives.take_certificate = take
    lives.next()

    lives.renewal.look(is_told=True)
    assert lives.renewal.stale["certificate"]
    lives.renewal.look(is_told=True)
    assert not lives.renewal.stale["certificate"]
