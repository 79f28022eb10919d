"""Messages about a Redis server that refuses: its words, and advice where there is any."""

import errno

import pytest
from redis.connection import DefaultParser
from redis.exceptions import ConnectionError as RedisConnectionError

from kvleased.movers.remote.redis_faults import said, said_by_none, unusable_file
from kvleased.movers.remote.store import RemoteError

CLUSTER = "it is a node of a Redis cluster, which has only some values; name a server that has all"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        pytest.param("MOVED 1 host:2", f"{CLUSTER} (1 host:2)", id="moved"),
        pytest.param("CLUSTERDOWN none", f"{CLUSTER} (none)", id="cluster down"),
        pytest.param(
            "MASTERDOWN its link is down",
            "its link is down; mend its link to its primary, or name that in remote_url",
            id="stale replica",
        ),
        pytest.param(
            "READONLY no writes.", "no writes; name its primary in remote_url", id="replica"
        ),
        pytest.param(
            "LOADING it reads", "it reads; wait; nothing else needs to be done", id="loading"
        ),
        pytest.param(
            "NOPERM no rights to run the 'get' command",
            "no permission: no rights to run the 'get' command; grant the user +get +getrange +strlen +set +unlink "
            "+expire ~kvlease:*",
            id="right",
        ),
        pytest.param(
            "NOPERM no rights to run the 'select' command",
            "no permission: no rights to run the 'select' command; grant the user +select, or use database 0 in "
            "remote_url",
            id="database",
        ),
        pytest.param(
            "ERR [SSL: WRONG_VERSION_NUMBER] wrong version number",
            "[SSL: WRONG_VERSION_NUMBER] wrong version number; use redis:// in remote_url if its port does not use TLS",
            id="no TLS",
        ),
        pytest.param(
            "ERR DB index is out of range",
            "DB index is out of range; use a database that the server has, such as 0, in remote_url",
            id="no such database",
        ),
        pytest.param(
            "ERR max number of clients reached",
            "max number of clients reached; raise maxclients of the server, or end other clients",
            id="no connection left",
        ),
        pytest.param("ERR something", "something", id="anything else"),
    ],
)
def test_refusal_is_told_with_what_to_do(answer: str, shown: str) -> None:
    """The advice comes although redis-py removes the first word of errors that it knows."""
    assert said(DefaultParser.parse_error(answer)) == shown


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        pytest.param(
            "Error 111 connecting to 127.0.0.1:1. Connection refused.",
            "start it, or correct the address in remote_url",
            id="nobody there",
        ),
        pytest.param(
            "Error 2 connecting to /run/redis.sock. No such file or directory.",
            "start it, or correct the address in remote_url",
            id="no socket",
        ),
        pytest.param(
            "Error -2 connecting to nowhere:1. Name or service not known.",
            "correct the host in remote_url, or what resolves its name",
            id="no such name",
        ),
        pytest.param(
            "Error -3 connecting to nowhere:1. Temporary failure in name resolution.",
            "correct the host in remote_url, or what resolves its name",
            id="no resolver",
        ),
        pytest.param(
            "Error 1 connecting to redis:1. [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate "
            "has expired (_ssl.c:1006).",
            "renew the server's certificate, or set the clock of this node",
            id="expired",
        ),
        pytest.param(
            "Error 1 connecting to redis:1. [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed "
            "certificate (_ssl.c:1006).",
            "name its authority with ssl_ca_certs in remote_url, and use the host name that the certificate has",
            id="unknown authority",
        ),
        pytest.param(
            "Error while reading from redis:1 : (1, '[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] certificate required')",
            "name a certificate that the server accepts, with ssl_certfile and ssl_keyfile in remote_url",
            id="no certificate of ours",
        ),
        pytest.param(
            "Protocol Error: b'HTTP/1.1 400 Bad Request'",
            "name a server that speaks the protocol of Redis in remote_url",
            id="a web server",
        ),
    ],
)
def test_server_that_cannot_be_reached_is_told_with_what_to_do(words: str, advice: str) -> None:
    """Who cannot be reached is told from the words of the system."""
    assert said(RedisConnectionError(words)) == f"{words.removesuffix('.')}; {advice}"


def test_error_without_words_is_told_by_its_name() -> None:
    """An error without a text is reported by its name, so that no reason is empty."""
    assert said(ConnectionResetError()) == "ConnectionResetError"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        pytest.param(
            DefaultParser.parse_error(f"NOPERM {'w' * 300} 'select' command"),
            "; grant the user +select, or use database 0 in remote_url",
            id="server",
        ),
        pytest.param(
            ConnectionError(f"Error while reading from {'w' * 300}"),
            "; use rediss:// in remote_url if its port uses TLS",
            id="no server that answered",
        ),
        pytest.param(
            unusable_file("/" + "w" * 300, OSError(errno.ENOENT, "No such file or directory")),
            "; name PEM files that the daemon can read",
            id="files",
        ),
    ],
)
def test_advice_is_whole_behind_words_that_are_cut(error: Exception, advice: str) -> None:
    """However long a server's or library's message is, the advice behind it is whole."""
    text = str(RemoteError(said_by_none(error)))

    assert len(text) == 240
    assert text.endswith(f"w...{advice}")


def test_secret_is_taken_out_before_words_are_cut() -> None:
    """Secrets are removed before the message is cut, as the cut could leave a part of one."""
    told = said(DefaultParser.parse_error(f"READONLY {'w' * 195}secret {'w' * 99}"), "secret")

    assert told.startswith(195 * "w" + "***")
