"""Own what is told of a Redis server that refuses, and what to do about it; its user decides what follows.

redis-py takes the first word off an error, and that is often the word that says what it is.
"""

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
    NoPermissionError: "grant the user +get +getrange +strlen +set +unlink +expire ~kvlease:*",
    OutOfMemoryError: "raise maxmemory, or set a maxmemory-policy that evicts, such as allkeys-lru",
    ReadOnlyError: "name its primary in remote_url",
    _UnusableFileError: "name PEM files that the daemon can read",
}
"""What to do, by the kind of error; for other errors the server's own words must be enough."""


_OF_A_DATABASE: Final = "'select' command"
"""Part of what the server tells a user who may use only database 0."""
_OF_A_CERTIFICATE: Final = "CERTIFICATE_VERIFY_FAILED"
_OF_NO_TLS: Final = "WRONG_VERSION_NUMBER"
"""Part of the error for an answer that is not TLS."""
_HUNG_UP: Final = ("while reading from", "while writing to", "Connection closed by server")
"""Parts of the errors for a connection that was made and then ended by the other side."""
IF_NO_TLS: Final = "use redis:// in remote_url if its port does not use TLS"
_IF_TLS: Final = "use rediss:// in remote_url if its port uses TLS"


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
    return _UnusableFileError(f"{files}: {error.strerror or type(error).__name__}")


def _advice(error: Exception) -> str:
    text = str(error)
    if _OF_A_DATABASE in text:
        return "grant the user +select, or use database 0 in remote_url"
    if _OF_A_CERTIFICATE in text:
        return "name its authority with ssl_ca_certs in remote_url, and use the host name that the certificate has"
    if _OF_NO_TLS in text:
        return IF_NO_TLS
    return _ADVICE.get(type(error), "")


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
