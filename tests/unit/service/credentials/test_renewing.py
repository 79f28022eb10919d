"""Laws of renewal: a change is taken once and whole, what cannot be used is not taken, and no file is read in vain."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvleased.access import tokens
from kvleased.access.roles import Role
from kvleased.access.tokens import Keyring
from kvleased.credentials.renewing import Renewal
from kvleased.credentials.tls import TlsFiles, expires_at, validity
from kvleased.system.directories import UnusableError
from tests.unit.api.certificates import Authority, Pair

NEW = "0123456789abcdef"


@pytest.fixture
def paths(tmp_path: Path) -> dict[Role, Path]:
    """Files with tokens."""
    found = {role: tmp_path / f"{role.value}.token" for role in (Role.READER, Role.OPERATOR)}
    tokens.ensure(found)
    return found


@pytest.fixture
def taken() -> list[Keyring]:
    """The keyrings that were taken."""
    return []


@pytest.fixture
def renewal(paths: dict[Role, Path], taken: list[Keyring]) -> Renewal:
    """A renewal that watches the tokens."""
    made = Renewal()
    made.watch_tokens(paths, taken.append)
    return made


def put(path: Path, text: str) -> None:
    """Replace a file by one with another text."""
    aside = path.with_suffix(".new")
    aside.touch(0o600)
    aside.write_text(text)
    aside.rename(path)


def test_unchanged_tokens_are_not_read_again(renewal: Renewal, taken: list[Keyring]) -> None:
    """Unchanged files are not read again unless the renewal is told to."""
    renewal.look()
    assert taken == []
    renewal.look(is_told=True)
    assert len(taken) == 1


def test_changed_token_is_taken_once(
    renewal: Renewal, taken: list[Keyring], paths: dict[Role, Path]
) -> None:
    """The next look takes the new token together with all others; the look after that takes nothing."""
    put(paths[Role.READER], NEW)
    renewal.look()
    renewal.look()

    (keyring,) = taken
    assert keyring.role_of(NEW) is Role.READER
    assert keyring.role_of(paths[Role.OPERATOR].read_text().strip()) is Role.OPERATOR
    assert renewal.stale == {"tokens": False}


@pytest.mark.parametrize("text", ["short", "", "two words, of which a token has one"])
def test_token_that_is_none_is_not_taken(
    renewal: Renewal, taken: list[Keyring], paths: dict[Role, Path], text: str
) -> None:
    """A malformed token is not taken and is reported as stale; the token that mends it is taken."""
    put(paths[Role.READER], text)
    renewal.look()
    assert (taken, renewal.stale) == ([], {"tokens": True})
    assert repr(renewal) == "<Renewal of tokens, stale: tokens>"

    put(paths[Role.READER], NEW)
    renewal.look()
    assert (len(taken), renewal.stale) == (1, {"tokens": False})


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_token_that_cannot_be_read_just_now_is_taken_later(
    renewal: Renewal,
    taken: list[Keyring],
    paths: dict[Role, Path],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """Where the process has no descriptor left, the file is read at a later look, unchanged; the log tells once."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    put(paths[Role.READER], NEW)
    with capture_logs() as logs, monkeypatch.context() as without:
        without.setattr(os, "open", refuse)
        renewal.look()
        renewal.look()
    assert (taken, renewal.stale) == ([], {"tokens": True})
    renewal.look()
    renewal.look()

    (keyring,) = taken
    assert keyring.role_of(NEW) is Role.READER
    assert renewal.stale == {"tokens": False}
    assert [one["event"] for one in logs] == ["credentials_not_taken"]


def test_token_that_is_gone_is_not_taken(
    renewal: Renewal, taken: list[Keyring], paths: dict[Role, Path]
) -> None:
    """If a file is removed, the old token stays in force until another file takes its place."""
    paths[Role.READER].unlink()
    renewal.look()

    assert (taken, renewal.stale) == ([], {"tokens": True})


def test_token_behind_a_link_is_seen_to_change(tmp_path: Path) -> None:
    """If a link is switched to another directory, as Kubernetes does, the token behind it now is taken."""
    taken: list[Keyring] = []
    for name, text in (("one", "f" * 16), ("two", NEW)):
        (tmp_path / name).mkdir()
        put(tmp_path / name / "token", text)
    (tmp_path / "now").symlink_to("one")
    renewal = Renewal()
    renewal.watch_tokens({Role.READER: tmp_path / "now" / "token"}, taken.append)

    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(tmp_path / "now")
    renewal.look()

    assert taken[0].role_of(NEW) is Role.READER


def test_certificate_is_taken_apart_from_tokens(
    renewal: Renewal, taken: list[Keyring], tmp_path: Path
) -> None:
    """A certificate that cannot be used does not keep tokens from being taken."""
    files = TlsFiles(cert_file=tmp_path / "cert", key_file=tmp_path / "key", client_ca_file=None)

    def refuse(refused: TlsFiles) -> None:
        message = f"{refused.cert_file} does not fit"
        raise UnusableError(message)

    renewal.watch_certificate(files, refuse)
    put(files.cert_file, "new")
    renewal.look()

    assert (taken, renewal.stale) == ([], {"tokens": False, "certificate": True})


class Certified:
    """A certificate that is watched at a time that the test sets."""

    def __init__(self, directory: Path) -> None:
        signed = Authority(directory).sign("server")
        self.files = TlsFiles(
            cert_file=directory / "tls", key_file=directory / "key", client_ca_file=None
        )
        self.pair = signed
        found = validity(signed.cert_file)
        assert found is not None
        self.begins_at, self.ends_at = found.begins_at, found.ends_at
        self.moment = (self.begins_at + self.ends_at) / 2
        self.taken: list[TlsFiles] = []
        self.renewal = Renewal(lambda: self.moment)
        put_pair(signed, self.files)

    def watch(self) -> list[str]:
        """Watch the certificate from now on; return the events that are logged."""
        with capture_logs() as logs:
            self.renewal.watch_certificate(self.files, self.taken.append)
        return [str(entry["event"]) for entry in logs]

    def look(self) -> list[str]:
        """Look now; return the levels and words that are logged."""
        with capture_logs() as logs:
            self.renewal.look()
        return [f"{entry['log_level']} {entry['event']} {entry.get('error', '')}" for entry in logs]


def put_pair(pair: Pair, files: TlsFiles) -> None:
    """Put a certificate and its key in their places."""
    put(files.key_file, pair.key_file.read_text())
    put(files.cert_file, pair.cert_file.read_text())


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    """A certificate that is valid."""
    return Certified(tmp_path)


def test_certificate_that_has_ended_is_not_taken(certified: Certified) -> None:
    """An expired certificate is warned of once, with its end, and the old one stays; a valid one is then taken."""
    assert certified.watch() == []
    put_pair(certified.pair, certified.files)
    now, certified.moment = certified.moment, certified.ends_at + 1

    (told,) = certified.look()
    assert told.startswith("warning credentials_not_taken the certificate in ")
    assert "expired at 20" in told
    assert (certified.taken, certified.renewal.stale) == ([], {"certificate": True})
    assert certified.look() == []

    certified.moment = now
    put_pair(certified.pair, certified.files)
    assert certified.look() == ["info credentials_taken "]
    assert certified.renewal.stale == {"certificate": False}


def test_certificate_that_has_not_begun_is_taken_when_it_does(certified: Certified) -> None:
    """A certificate that begins later is taken then without another change: perhaps the daemon's clock is behind."""
    certified.watch()
    put_pair(certified.pair, certified.files)
    certified.moment = certified.begins_at - 60

    (told,) = certified.look()
    assert told.startswith("warning credentials_not_taken the certificate in ")
    assert "not valid before 20" in told
    assert certified.look() == []
    assert certified.renewal.stale == {"certificate": True}

    certified.moment = certified.begins_at
    assert certified.look() == ["info credentials_taken "]
    assert (len(certified.taken), certified.renewal.stale) == (1, {"certificate": False})


@pytest.mark.parametrize("seconds_off", [-4 * 86_400, 4 * 86_400], ids=["not begun", "ended"])
def test_start_with_a_certificate_out_of_date_is_told(
    certified: Certified, seconds_off: float
) -> None:
    """With a certificate out of date the daemon still starts, and warns that clients will refuse the certificate."""
    certified.moment += seconds_off

    assert certified.watch() == ["certificate_out_of_date"]
    assert certified.renewal.stale == {"certificate": True}


def test_authority_out_of_date_is_not_taken(certified: Certified, tmp_path: Path) -> None:
    """An authority of clients that has ended, or not begun, is not taken: the daemon would let nobody in."""
    ended, begun, later = (
        Authority(tmp_path).sign_between(name, *days).cert_file.read_text()
        for name, days in {"ended": (-9, -1), "begun": (-9, 9), "later": (1.5, 9)}.items()
    )
    authority = tmp_path / "clients"
    put(authority, begun)
    certified.files = replace(certified.files, client_ca_file=authority)
    certified.moment = time.time()
    assert certified.watch() == []

    put(authority, ended)
    (told,) = certified.look()
    assert told.startswith(
        "warning credentials_not_taken the authority of clients' certificates in "
    )
    assert "expired at 20" in told
    assert (certified.taken, certified.renewal.stale) == ([], {"certificate": True})

    put(authority, ended + begun)
    assert certified.look() == ["info credentials_taken "]

    put(authority, ended + later)
    (told,) = certified.look()
    assert "not valid before 20" in told
    certified.moment += 1.6 * 86_400
    assert certified.look() == ["info credentials_taken "]
    assert certified.renewal.stale == {"certificate": False}


def test_start_with_an_authority_out_of_date_is_told(certified: Certified, tmp_path: Path) -> None:
    """With an authority of clients out of date the daemon still starts, and warns of it."""
    ended = Authority(tmp_path).sign_between("ended", -9, -1)
    certified.files = replace(certified.files, client_ca_file=ended.cert_file)

    assert certified.watch() == ["certificate_out_of_date"]
    assert certified.renewal.stale == {"certificate": True}


def test_end_is_the_authoritys_if_that_is_earlier(tmp_path: Path) -> None:
    """The end is that of the certificate, or of the last authority of clients if that is earlier."""
    authority = Authority(tmp_path)
    long, short, ended = (
        authority.sign_between(name, -9, days)
        for name, days in (("long", 9), ("short", 5), ("ended", -1))
    )
    clients = tmp_path / "clients"
    clients.write_text(short.cert_file.read_text() + ended.cert_file.read_text())
    alone = TlsFiles(cert_file=long.cert_file, key_file=long.key_file, client_ca_file=None)

    assert alone.expires_at() == expires_at(long.cert_file)
    assert replace(alone, client_ca_file=clients).expires_at() == expires_at(short.cert_file)
    assert replace(
        alone, cert_file=ended.cert_file, client_ca_file=clients
    ).expires_at() == expires_at(ended.cert_file)
    assert replace(alone, client_ca_file=tmp_path / "nowhere").expires_at() == expires_at(
        long.cert_file
    )


def test_nothing_is_watched_where_there_is_nothing() -> None:
    """A daemon without TCP has no tokens, and one without TLS no certificate."""
    renewal = Renewal()
    renewal.watch_tokens({}, lambda _: None)
    renewal.watch_certificate(None, lambda _: None)
    renewal.look(is_told=True)

    assert renewal.stale == {}
