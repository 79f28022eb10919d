"""A URL says where a store is, and its text never shows the password."""

from pathlib import Path

import pytest

from kvleased.config.addresses import RemoteUrl, RemoteUrlError, unreadable_file


def test_parts_are_taken_out_of_their_escapes() -> None:
    """User and password may have any character, written as an escape."""
    url = RemoteUrl.parse("rediss://us%40er:p%2Fw%23@[::1]:7000/4?ssl_ca_certs=/a%20b.pem")

    assert (url.scheme, url.host, url.port) == ("rediss", "::1", 7000)
    assert (url.username, url.password) == ("us@er", "p/w#")
    assert (url.number("db", 0), url.options["ssl_ca_certs"]) == (4, "/a b.pem")
    assert url.is_set("ssl_check_hostname", default=True)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://u:secret@h", "redis://h:6379"),
        ("rediss://:secret@[::1]:7/2", "rediss://[::1]:7"),
        ("unix://u:secret@/run/a%20b.sock?db=1", "unix:///run/a b.sock"),
        ("mooncake://m?segment_bytes=5&metadata=http://x/y", "mooncake://m:50051"),
    ],
)
def test_password_is_not_shown(text: str, shown: str) -> None:
    """Neither the text nor the repr of a URL has a password in it."""
    url = RemoteUrl.parse(text)

    assert str(url) == shown
    assert "secret" not in repr(url)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("http://h", id="other scheme"),
        pytest.param("redis://", id="no host"),
        pytest.param("unix://", id="no path"),
        pytest.param("redis://h:99999", id="port beyond"),
        pytest.param("redis://[h", id="no address"),
        pytest.param("redis://u:pw#x@h", id="unescaped"),
        pytest.param("redis://h/one", id="database without a number"),
        pytest.param("mooncake://h/1", id="database of a store that has none"),
        pytest.param("redis://h?db=-1", id="negative"),
        pytest.param("redis://h?socket_timeout=999", id="deadline got round"),
        pytest.param("rediss://h?ssl_cert_reqs=none", id="certificate not looked at"),
        pytest.param("rediss://h?ssl_check_hostname=maybe", id="neither true nor false"),
        pytest.param("redis://h?db=3&db=4", id="option twice"),
        pytest.param("redis://h/4?db=4", id="database twice"),
        pytest.param("redis://h?pw=1&pw=2", id="unknown option twice"),
        pytest.param("mooncake://h?segment_bytes=1GB", id="bytes with a unit"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str) -> None:
    """A URL that would not work, or would lift a limit, is refused with a reason that has no password."""
    with pytest.raises(RemoteUrlError) as refusal:
        RemoteUrl.parse(text)

    assert "pw" not in str(refusal.value)


def test_files_of_an_address_must_be_readable(tmp_path: Path) -> None:
    """A missing certificate is reported with its option and path; an address without files is not checked."""
    there, missing = tmp_path / "ca.pem", tmp_path / "key.pem"
    there.touch()
    address = f"rediss://:pw@h?ssl_ca_certs={there}"

    assert unreadable_file("") == unreadable_file("redis://h") == unreadable_file(address) == ""
    reason = unreadable_file(f"{address}&ssl_keyfile={missing}")
    assert "ssl_keyfile" in reason
    assert str(missing) in reason
    assert "pw" not in reason
