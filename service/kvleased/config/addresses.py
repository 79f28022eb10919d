"""Own the addresses of remote stores: their schemes, their options, and which parts may be shown."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""The options that name files."""
_OPTIONS: Final[Mapping[str, frozenset[str]]] = {
    "redis": frozenset({"db"}),
    "rediss": frozenset({"db", "ssl_check_hostname", *TLS_FILES}),
    "unix": frozenset({"db"}),
    "mooncake": frozenset({"metadata", "segment_bytes", "buffer_bytes", "host"}),
}
"""The options that a query may have, by scheme; not limits and deadlines, which are settings and cannot be bypassed."""
_NUMBERS: Final = frozenset({"db", "segment_bytes", "buffer_bytes"})
_BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "false": False}
_DEFAULT_PORTS: Final[Mapping[str, int]] = {"redis": 6379, "rediss": 6379, "mooncake": 50051}
_CREDENTIALS: Final = re.compile(r"(?<=://)\S*@")
_SHOWN_MAX: Final = 40
"""Most characters of a wrong scheme that a message repeats."""


class RemoteUrlError(ValueError):
    """The address of the remote store cannot be used; the message says why, and contains no password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteUrl:
    """The address of a remote store, with the credentials to enter it."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    """The path of a Unix socket."""
    username: str = ""
    password: str = field(default="", repr=False)
    options: Mapping[str, str]
    """The options of the query, checked."""

    @classmethod
    def parse(cls, url: str) -> "RemoteUrl":
        """Return the parts of an address.

        Raises:
            RemoteUrlError: the address cannot be used; the message repeats nothing that could be a password.
        """
        _check_scheme(url)
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _not_whole() from None
        if parts.fragment:
            raise RemoteUrlError("write a # in a password as %23")
        options = _options(parts)
        if parts.scheme == "unix":
            if len(parts.path) <= 1:
                raise _not_whole()
        elif not parts.hostname or port == 0:
            raise _not_whole()
        elif parts.path.strip("/"):
            if "db" in options:
                raise _twice("db")
            options["db"] = _database(parts)
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
        """Return the address for logs, without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        place = self.path or f"{host}:{self.port}"
        return f"{self.scheme}://{place}"

    def number(self, option: str, default: int) -> int:
        """Return an option that is a number."""
        return int(self.options.get(option, default))

    def is_set(self, option: str, *, default: bool) -> bool:
        """Return an option that is true or false."""
        return _BOOLEANS.get(self.options.get(option, ""), default)

    @property
    def files(self) -> Mapping[str, Path]:
        """The files that the options name."""
        return {name: Path(self.options[name]) for name in TLS_FILES if name in self.options}


def check_address(url: object) -> str:
    """Return an address, checked; "" if there is none.

    Raises:
        RemoteUrlError: the address cannot be used.
    """
    if url is None or url == "":
        return ""
    if not isinstance(url, str):
        raise RemoteUrlError(f"it must be a string that starts with one of {_schemes()}")
    RemoteUrl.parse(url)
    return url


def unreadable_file(url: str) -> str:
    """Return why a file that an address names cannot be read, or "": the files must be readable at every start.

    An address without files, and an empty address, are all right.
    """
    for option, path in RemoteUrl.parse(url).files.items() if url else ():
        try:
            with path.open("rb"):
                continue
        except OSError as error:
            return f"{option} of the remote store: {path} cannot be read: {error.strerror}"
    return ""


def without_credentials(text: str) -> str:
    """Return a text with users and passwords removed from its addresses, also if a / in one is not written as %2F."""
    return _CREDENTIALS.sub("***@", text)


def _schemes() -> str:
    return ", ".join(f"{scheme}://" for scheme in _OPTIONS)


def _not_whole() -> RemoteUrlError:
    return RemoteUrlError(
        "the scheme must be followed by a host and a port, or unix:// by the path of a socket"
    )


def _check_scheme(url: str) -> None:
    if not url.isprintable() or "://" not in url:
        raise RemoteUrlError(f"it must start with one of {_schemes()}")
    scheme = url.partition("://")[0]
    if scheme not in _OPTIONS:
        # If the part before :// does not look like a scheme, it may be a password, so it is not repeated.
        shown = scheme[:_SHOWN_MAX] if re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) else "unknown"
        raise RemoteUrlError(f"its scheme is {shown}; it must start with one of {_schemes()}")


def _options(parts: SplitResult) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in options:
            raise _twice(name)
        options[name] = value
    unknown = options.keys() - _OPTIONS[parts.scheme]
    if unknown:
        known = ", ".join(sorted(_OPTIONS[parts.scheme]))
        raise RemoteUrlError(
            f"only these options are allowed after the ? of {parts.scheme}://: {known}"
        )
    for name in options.keys() & _NUMBERS:
        if not (options[name].isascii() and options[name].isdigit()):
            raise RemoteUrlError(f"{name} must be a whole number")
    if options.get("ssl_check_hostname", "true") not in _BOOLEANS:
        raise RemoteUrlError("ssl_check_hostname must be true or false")
    return options


def _twice(option: str) -> RemoteUrlError:
    # A name that is no option's may be a part of a password, so it is not repeated.
    is_known = any(option in known for known in _OPTIONS.values())
    return RemoteUrlError(f"it has {option if is_known else 'an option'} twice; write it once")


def _database(parts: SplitResult) -> str:
    database = parts.path.strip("/")
    if "db" not in _OPTIONS[parts.scheme] or not (database.isascii() and database.isdigit()):
        raise RemoteUrlError("only the number of a database is allowed after the host")
    return database
