"""Own the URLs of remote stores: which there are, what may stand in them, and what of them may be shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

_OPTIONS: Final[Mapping[str, frozenset[str]]] = {
    "redis": frozenset({"db"}),
    "rediss": frozenset(
        {"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}
    ),
    "unix": frozenset({"db"}),
    "mooncake": frozenset({"metadata", "segment_bytes", "buffer_bytes", "host"}),
}
"""By scheme what may stand in the query; limits and deadlines are settings, so that none of them can be got round."""
_NUMBERS: Final = frozenset({"db", "segment_bytes", "buffer_bytes"})
_BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "false": False}
_DEFAULT_PORTS: Final[Mapping[str, int]] = {"redis": 6379, "rediss": 6379, "mooncake": 50051}


class RemoteUrlError(ValueError):
    """The URL of the remote store cannot be used; its text says why and has no password in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteUrl:
    """Where a remote store is and how to enter it."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    """Of a Unix socket."""
    username: str = ""
    password: str = field(default="", repr=False)
    options: Mapping[str, str]
    """As in the query, checked."""

    @classmethod
    def parse(cls, url: str) -> "RemoteUrl":
        """Return the parts of a URL.

        Raises:
            RemoteUrlError: it cannot be used.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise RemoteUrlError("remote_url: it is no URL") from error
        if parts.scheme not in _OPTIONS:
            schemes = ", ".join(f"{scheme}://" for scheme in _OPTIONS)
            raise RemoteUrlError(f"remote_url: it must start with one of {schemes}")
        if parts.fragment:
            raise RemoteUrlError("remote_url: write a # in a password as %23")
        options = _options(parts)
        if parts.scheme == "unix":
            if not parts.path:
                raise RemoteUrlError("remote_url: unix:// needs the path of a socket")
        elif not parts.hostname:
            raise RemoteUrlError(f"remote_url: {parts.scheme}:// needs a host")
        elif parts.path.strip("/"):
            options.setdefault("db", _database(parts))
        return cls(
            scheme=parts.scheme,
            host=parts.hostname or "",
            port=port or _DEFAULT_PORTS.get(parts.scheme, 0),
            path=unquote(parts.path) if parts.scheme == "unix" else "",
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            options=options,
        )

    def __str__(self) -> str:
        """Return what may stand in logs: where it is, not how to enter it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        place = self.path or f"{host}:{self.port}"
        return f"{self.scheme}://{place}"

    def number(self, option: str, default: int) -> int:
        """Return an option that is a number."""
        return int(self.options.get(option, default))

    def is_set(self, option: str, *, default: bool) -> bool:
        """Return an option that is true or false."""
        return _BOOLEANS.get(self.options.get(option, ""), default)


def _options(parts: SplitResult) -> dict[str, str]:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = options.keys() - _OPTIONS[parts.scheme]
    if unknown:
        known = ", ".join(sorted(_OPTIONS[parts.scheme]))
        raise RemoteUrlError(f"remote_url: after the ? of {parts.scheme}:// may stand only {known}")
    for name in options.keys() & _NUMBERS:
        if not (options[name].isascii() and options[name].isdigit()):
            raise RemoteUrlError(f"remote_url: {name} must be a whole number")
    if options.get("ssl_check_hostname", "true") not in _BOOLEANS:
        raise RemoteUrlError("remote_url: ssl_check_hostname must be true or false")
    return options


def _database(parts: SplitResult) -> str:
    database = parts.path.strip("/")
    if "db" not in _OPTIONS[parts.scheme] or not (database.isascii() and database.isdigit()):
        raise RemoteUrlError("remote_url: after the host may stand only the number of a database")
    return database
