"""Own what is said of a Redis server that refuses, and what to do about it; what follows from it is its user's matter.

redis-py takes the first word off an error, which often is the one that says what it is.
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
    "it is a node of a Redis cluster, which has a part of the values; name a server that has all"
)
_ADVICE: Final[Mapping[type[Exception], str]] = {
    AuthenticationError: "mend user and password in remote_url",
    BusyLoadingError: "nothing is to be done but to wait",
    NoPermissionError: "give the user +get +getrange +strlen +set +unlink +expire +ping ~kvlease:*",
    OutOfMemoryError: "raise maxmemory, or set a maxmemory-policy that evicts, such as allkeys-lru",
    ReadOnlyError: "name its primary in remote_url",
    _UnusableFileError: "name PEM files that the daemon may read",
}
"""What to do, by the kind of error; for the others the server's words must do."""


_OF_A_DATABASE: Final = "'select' command"
"""In what is said to a user that may use database 0 alone."""
_OF_A_CERTIFICATE: Final = "CERTIFICATE_VERIFY_FAILED"
_OF_NO_TLS: Final = "WRONG_VERSION_NUMBER"
"""In what is made of an answer that is none of TLS."""
_HUNG_UP: Final = ("while reading from", "while writing to", "Connection closed by server")
"""In what is said of a connection that was made and then ended from the other side."""
IF_NO_TLS: Final = "name it by redis:// in remote_url if its port speaks no TLS"
_IF_TLS: Final = "name it by rediss:// in remote_url if its port speaks TLS"


def said(error: Exception, secret: str = "") -> str:
    """Return what a server or the way to it said, without the secret, and what to do about it where that is known."""
    return _told(str(error) or type(error).__name__, _advice(error), error, secret)


def said_by_none(error: Exception, secret: str = "") -> str:
    """Return what is said of a server that has never answered: what is plain gets no answer from one of TLS."""
    words = str(error)
    if any(one in words for one in _HUNG_UP):
        return _told(words, _IF_TLS, error, secret)
    return said(error, secret)


def unusable_file(files: str, error: OSError) -> RedisConnectionError:
    """Return the error of files of a certificate, a key or an authority: redis-py would not name them."""
    return _UnusableFileError(f"{files}: {error.strerror or type(error).__name__}")


def _advice(error: Exception) -> str:
    text = str(error)
    if _OF_A_DATABASE in text:
        return "give the user +select, or name no database but 0 in remote_url"
    if _OF_A_CERTIFICATE in text:
        return (
            "name its authority by ssl_ca_certs in remote_url, and the host as the certificate does"
        )
    if _OF_NO_TLS in text:
        return IF_NO_TLS
    return _ADVICE.get(type(error), "")


def _told(words: str, advice: str, error: Exception, secret: str) -> str:
    """Return words and advice: the secret goes before anything is cut, as a part of it would be none to look for."""
    if secret:
        words = words.replace(secret, "***")
    is_of_cluster = isinstance(error, (AskError, ClusterDownError))
    if is_of_cluster and not isinstance(error, MasterDownError):
        # What it says is a slot of the cluster and an address.
        return f"{_ONE_OF_MANY} ({words})"
    if isinstance(error, NoPermissionError):
        words = f"no permission: {words}"
    return advised(words.removesuffix("."), advice) if advice else words
