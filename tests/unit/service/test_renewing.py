"""Laws of renewal: what changed is taken once and whole, what cannot be used is not, and nothing is read needlessly."""

from pathlib import Path

import pytest

from kvleased import tokens
from kvleased.api.tls import TlsFiles
from kvleased.directories import UnusableError
from kvleased.renewing import Renewal
from kvleased.roles import Role
from kvleased.tokens import Keyring

NEW = "0123456789abcdef"


@pytest.fixture
def paths(tmp_path: Path) -> dict[Role, Path]:
    """Files with tokens."""
    found = {role: tmp_path / f"{role.value}.token" for role in (Role.READER, Role.OPERATOR)}
    tokens.ensure(found)
    return found


@pytest.fixture
def taken() -> list[Keyring]:
    """What was taken."""
    return []


@pytest.fixture
def renewal(paths: dict[Role, Path], taken: list[Keyring]) -> Renewal:
    """One that watches the tokens."""
    made = Renewal()
    made.watch_tokens(paths, taken.append)
    return made


def put(path: Path, text: str) -> None:
    """Put another file in the place of one."""
    aside = path.with_suffix(".new")
    aside.touch(0o600)
    aside.write_text(text)
    aside.rename(path)


def test_unchanged_tokens_are_not_read_again(renewal: Renewal, taken: list[Keyring]) -> None:
    """A look at what has not changed does nothing, unless one is told to."""
    renewal.look()
    assert taken == []
    renewal.look(is_told=True)
    assert len(taken) == 1


def test_changed_token_is_taken_once(
    renewal: Renewal, taken: list[Keyring], paths: dict[Role, Path]
) -> None:
    """The next look takes it, with all others, and the one after that nothing."""
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
    """Nothing is taken, that is told, and what mends it is taken."""
    put(paths[Role.READER], text)
    renewal.look()
    assert (taken, renewal.stale) == ([], {"tokens": True})
    assert repr(renewal) == "<Renewal of tokens, stale: tokens>"

    put(paths[Role.READER], NEW)
    renewal.look()
    assert (len(taken), renewal.stale) == (1, {"tokens": False})


def test_token_that_is_gone_is_not_taken(
    renewal: Renewal, taken: list[Keyring], paths: dict[Role, Path]
) -> None:
    """A file that is removed locks nobody out: another must take its place first."""
    paths[Role.READER].unlink()
    renewal.look()

    assert (taken, renewal.stale) == ([], {"tokens": True})


def test_token_behind_a_link_is_seen_to_change(tmp_path: Path) -> None:
    """Where a link is led elsewhere, as Kubernetes does, what it leads to now is taken."""
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
    """A certificate that cannot be used says nothing of tokens that can."""
    files = TlsFiles(cert_file=tmp_path / "cert", key_file=tmp_path / "key", client_ca_file=None)

    def refuse(refused: TlsFiles) -> None:
        message = f"{refused.cert_file} does not fit"
        raise UnusableError(message)

    renewal.watch_certificate(files, refuse)
    put(files.cert_file, "new")
    renewal.look()

    assert (taken, renewal.stale) == ([], {"tokens": False, "certificate": True})


def test_nothing_is_watched_where_there_is_nothing() -> None:
    """A daemon without TCP has no tokens, and one without TLS no certificate."""
    renewal = Renewal()
    renewal.watch_tokens({}, lambda _: None)
    renewal.watch_certificate(None, lambda _: None)
    renewal.look(is_told=True)

    assert renewal.stale == {}
