"""Own what is told of a Redis server that refuses, and what to do about it; its user decides what follows.

redis-py takes the first word off an error, and that is often the word that says what it is.
"""

import errno
from collections.abc import Mapping
from typing import Final

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from kvleased.movers.remote.store import advised


class _UnusableFileError(RedisConnectionError):
    """Files that the URL names cannot be used."""


_ONE_OF_MANY: Final = (
    "it is a node of a Redis cluster, which has only some values; name a server that has all"
)
_ADVICE: Final[Mapping[type[Exception], str]] = {
    AuthenticationError: "correct the user and password in remote_url",
    BusyLoadingError: "wait; nothing else needs to be done",
    MasterDownError: "mend its link to its primary, or name that in remote_url",
    NoPermissionError: "grant the user +get +getrange +strlen +set +unlink +expire ~kvlease:*",
    OutOfMemoryError: "raise maxmemory, or set a maxmemory-policy that evicts, such as allkeys-lru",
    ReadOnlyError: "name its primary in remote_url",
    _UnusableFileError: "name PEM files that the daemon can read",
}
"""What to do, by the kind of error; for other errors the server's own words must be enough."""


_HUNG_UP: Final = ("while reading from", "while writing to", "Connection closed by server")
"""Parts of the errors for a connection that was made and then ended by the other side."""
IF_NO_TLS: Final = "use redis:// in remote_url if its port does not use TLS"
_IF_TLS: Final = "use rediss:// in remote_url if its port uses TLS"
_IF_NOT_THERE: Final = "start it, or correct the address in remote_url"
_IF_UNKNOWN: Final = "correct the host in remote_url, or what resolves its name"
_IF_OUT_OF_DATE: Final = "renew the server's certificate, or set the clock of this node"
_IF_NOT_ACCEPTED: Final = (
    "name a certificate that the server accepts, with ssl_certfile and ssl_keyfile in remote_url"
)
_BY_WORDS: Final[Mapping[str, str]] = {
    "'select' command": "grant the user +select, or use database 0 in remote_url",
    "Protocol Error": "name a server that speaks the protocol of Redis in remote_url",
    "DB index is out of range": "use a database that the server has, such as 0, in remote_url",
    "max number of clients": "raise maxclients of the server, or end other clients",
    "certificate has expired": _IF_OUT_OF_DATE,
    "certificate is not yet valid": _IF_OUT_OF_DATE,
    "CERTIFICATE_VERIFY_FAILED": (
        "name its authority with ssl_ca_certs in remote_url, and use the host name that the certificate has"
    ),
    "ALERT_CERTIFICATE_REQUIRED": _IF_NOT_ACCEPTED,
    "ALERT_CERTIFICATE_EXPIRED": _IF_NOT_ACCEPTED,
    "ALERT_BAD_CERTIFICATE": _IF_NOT_ACCEPTED,
    "ALERT_UNKNOWN_CA": _IF_NOT_ACCEPTED,
    "WRONG_VERSION_NUMBER": IF_NO_TLS,
    "Connection refused": _IF_NOT_THERE,
    f"Error {errno.ENOENT} connecting to": _IF_NOT_THERE,
    "Name or service not known": _IF_UNKNOWN,
    "No address associated with hostname": _IF_UNKNOWN,
    "Temporary failure in name resolution": _IF_UNKNOWN,
}
"""What to do, by a part of what a server, the system or TLS says; the first that is found counts."""


def said(error: Exception, secret: str = "") -> str:
    """Return what a server or the way to it said, without the secret, and, if known, what to do about it."""
    return _told(str(error) or type(error).__name__, _advice(error), error, secret)


def said_by_none(error: Exception, secret: str = "") -> str:
    """Return what to tell of a server that has never answered: a TLS server does not answer plain connections."""
    words = str(error)
    if any(one in words for one in _HUNG_UP):
        return _told(words, _IF_TLS, error, secret)
    return said(error, secret)


def unusable_file(files: str, error: OSError) -> RedisConnectionError:
    """Return the error for the files of a certificate, key or authority, which redis-py would not name."""
    return _UnusableFileError(f"{files}: {error.strerror or error}")


def _advice(error: Exception) -> str:
    words = str(error)
    by_words = (advice for part, advice in _BY_WORDS.items() if part in words)
    return next(by_words, _ADVICE.get(type(error), ""))


def _told(words: str, advice: str, error: Exception, secret: str) -> str:
    """Return words and advice; hide the secret before anything is cut, because a part of it would not be found."""
    if secret:
        words = words.replace(secret, "***")
    is_of_cluster = isinstance(error, (AskError, ClusterDownError))
    if is_of_cluster and not isinstance(error, MasterDownError):
        # The words are a slot of the cluster and an address.
        return f"{_ONE_OF_MANY} ({words})"
    if isinstance(error, NoPermissionError):
        words = f"no permission: {words}"
    return advised(words.removesuffix("."), advice) if advice else words
