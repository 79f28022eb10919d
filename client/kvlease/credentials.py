"""Own the credentials of a connection over TCP: the tokens and certificates that each side shows, and their files.

Over Unix sockets none are needed: the daemon sees which user calls.
"""

import os
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from kvlease._checks import check_type
from kvlease.errors import InvalidError

if TYPE_CHECKING:
    import ssl

TOKEN_FILE_VARIABLE: Final = "KVLEASE_TOKEN_FILE"  # noqa: S105 -- a name
"""These environment variables name the files to use if a caller gives no credentials."""
CA_FILE_VARIABLE: Final = "KVLEASE_CA_FILE"
CERT_FILE_VARIABLE: Final = "KVLEASE_CERT_FILE"
KEY_FILE_VARIABLE: Final = "KVLEASE_KEY_FILE"
PLAIN_PEER: Final = "WRONG_VERSION_NUMBER"
"""The error of OpenSSL and BoringSSL if the peer answers a TLS handshake without TLS."""

_OUT_OF_DATE: Final = ("expired", "not yet valid")
_OF_ANOTHER_HOST: Final = ("mismatch", "Hostname")
"""Words in the reasons for which TLS libraries refuse a certificate: out of date, or of another host."""
_OPERATORS: Final = "operator.token"
_READERS: Final = "reader.token"
"""Token files that a daemon of this user writes to its runtime directory."""
_TOKEN_FORM: Final = "a token is one word of printable ASCII characters"  # noqa: S105 -- says what one is
_LISTENS: Final = "0A"
"""The state of a listening socket in the kernel's tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a client shows a daemon over TCP (a token, a certificate, both or neither), and which daemons it trusts."""

    token: str = field(default="", repr=False)
    """The bearer token of a role; once a worker is attached, it uses its own token instead."""
    ca_file: str = ""
    """PEM file of the authority that signs daemons' certificates; empty: the authorities that the system trusts."""
    cert_file: str = ""
    key_file: str = ""
    """PEM files of the client's own certificate and its key, if the daemon asks for one."""

    def tls(self) -> "ssl.SSLContext":
        """Return the TLS context for HTTPS.

        Raises:
            InvalidError: a file cannot be read.
        """
        import ssl  # noqa: PLC0415 - loaded only where TLS is used

        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as error:
            advice = f"name the PEM file of an authority in {CA_FILE_VARIABLE}, or in Credentials"
            raise _unusable(self.ca_file, error, advice) from error
        if self.cert_file:
            self._show_certificate(context)
        return context

    def _show_certificate(self, context: "ssl.SSLContext") -> None:
        files = [path for path in (self.cert_file, self.key_file) if path]
        for path in files:
            # Read here first, because OpenSSL does not say which file is missing.
            _content(path)
        try:
            context.load_cert_chain(self.cert_file, self.key_file or None, ask_for_no_phrase)
        except OSError as error:
            message = (
                f"{' and '.join(files)} cannot be used: {error.strerror or error}; name the PEM files of a certificate "
                f"and its key in {CERT_FILE_VARIABLE} and {KEY_FILE_VARIABLE}, or in Credentials"
            )
            raise InvalidError(message, resource="credentials") from error

    def pem(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the contents of the files of authority, key and certificate, in the order that gRPC takes them.

        Raises:
            InvalidError: a file cannot be read or used, or the certificate and its key do not fit.
        """
        if self.ca_file or self.cert_file:
            # gRPC would say of a file that it cannot use only that the daemon cannot be reached.
            self.tls()
        authority, key, certificate = (
            _content(path) if path else None
            for path in (self.ca_file, self.key_file or self.cert_file, self.cert_file)
        )
        return authority, key, certificate


NO_CREDENTIALS: Final = Credentials()
"""Nothing to show."""


def ask_for_no_phrase() -> NoReturn:
    """Refuse a key that needs a pass phrase, for which OpenSSL would ask at the terminal, and wait.

    Raises:
        OSError: always.
    """
    raise OSError(
        "the key is encrypted, and nobody is asked for its pass phrase; write it without one, with "
        "(umask 077; openssl pkey -in KEY -out FILE)"
    )


def from_environment() -> Credentials:
    """Return the credentials in the files that the environment names.

    Raises:
        InvalidError: the token's file cannot be read, or has no token.
    """
    path = os.environ.get(TOKEN_FILE_VARIABLE, "")
    return Credentials(
        token=token_in(path) if path else "",
        ca_file=os.environ.get(CA_FILE_VARIABLE, ""),
        cert_file=os.environ.get(CERT_FILE_VARIABLE, ""),
        key_file=os.environ.get(KEY_FILE_VARIABLE, ""),
    )


def readers_file(named: str, host: str, port: int, directory: Path) -> str:
    """Return the file of a reader's token: `named`, else the environment's, else the one that this user's daemon left.

    Raises:
        InvalidError: no file is named, and the daemon that listens there is not this user's.
    """
    if found := named or os.environ.get(TOKEN_FILE_VARIABLE, ""):
        return found
    # As for an operator's token: anybody's program might listen there.
    if not _is_loopback(host) or not _is_own(port):
        message = (
            f"no daemon of this user listens at {host}:{port}; start it without --no-listen-tcp, pass its address "
            "with --address http://HOST:PORT, or name the file of a reader's token for that address with --token-file "
            f"or {TOKEN_FILE_VARIABLE}"
        )
        raise InvalidError(message, resource="address")
    return str(directory / _READERS)


def token_in(path: str) -> str:
    """Return the token in a file.

    Raises:
        InvalidError: the file cannot be read, or has something else.
    """
    found = _content(path).decode("ascii", "replace").strip()
    if not found or not _is_word(found):
        what = "is empty" if not found else "has something else"
        message = f"{path} {what}; {_TOKEN_FORM}; name a file that has one alone"
        raise InvalidError(message, resource="credentials")
    return found


def checked(credentials: Credentials) -> Credentials:
    """Return the credentials that a caller gives; nothing of a token that is refused is shown.

    Raises:
        InvalidError: they are no credentials, or have a token that no header can carry.
    """
    check_type("credentials", credentials, Credentials | None)
    if not isinstance(credentials.token, str) or not _is_word(credentials.token):
        message = f"the token of the credentials is something else; {_TOKEN_FORM}"
        raise InvalidError(message, resource="credentials")
    for name in ("ca_file", "cert_file", "key_file"):
        check_type(name, getattr(credentials, name), str, of=" of the credentials")
    return credentials


class Bearer:
    """The token of calls that have none of their own; looked for on first use, as the daemon may start later."""

    def __init__(self, credentials: Credentials, host: str, port: int, directory: Path) -> None:
        """Take the credentials given, and the directory where a daemon of this user leaves its token.

        Who shows a certificate acts in its role alone, so that no token is looked for.
        """
        self._given = credentials.token
        self._has_certificate = bool(credentials.cert_file)
        self._host = host
        self._port = port
        self._file = directory / _OPERATORS

    def __repr__(self) -> str:
        """Show whether a token was given."""
        return f"<Bearer {'given' if self._given else 'to be found'}>"

    @property
    def token(self) -> str:
        """The token; empty if there is none."""
        if self._given or self._has_certificate or not _is_loopback(self._host):
            return self._given
        return self._found

    @cached_property
    def _found(self) -> str:
        # Any user may listen on loopback, so the token is shown only to programs of this user and of root.
        if not _is_own(self._port):
            return ""
        try:
            return self._file.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""


def not_taken(address: object, reason: str) -> str:
    """Say that a daemon's certificate was refused, with the TLS library's reason, and what to change."""
    if any(sign in reason for sign in _OUT_OF_DATE):
        advice = "renew the daemon's certificate, or correct this machine's clock"
    elif any(sign in reason for sign in _OF_ANOTHER_HOST):
        advice = "use a host that the certificate names"
    else:
        advice = f"set {CA_FILE_VARIABLE} to the certificate file of the authority that signed it"
    return f"the certificate of {address} was not accepted ({reason.rstrip('.')}); {advice}"


def wanted_certificate(shown: Credentials) -> str:
    """Return the advice to a client whose connection ended without a reason just after the TLS handshake."""
    if shown.cert_file:
        return (
            "; a daemon that requires client certificates closes connections that show another: see that "
            f"{shown.cert_file} is valid now, and of the authority that the daemon's --tls-client-ca-file names"
        )
    return (
        f"; a daemon that requires client certificates closes connections that show none: set {CERT_FILE_VARIABLE} and "
        f"{KEY_FILE_VARIABLE} to the files of your certificate and its key"
    )


def _is_word(token: str) -> bool:
    """Tell whether a token is one word, which every transport carries, or empty."""
    return token.isascii() and token.isprintable() and " " not in token


def _is_own(port: int) -> bool:
    """Tell whether anybody listens on a port, and only this user or root does."""
    users = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *rest = line.split()
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                users.add(int(rest[3]))
    return bool(users) and users <= {0, os.getuid()}


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: str, error: OSError, advice: str = "") -> InvalidError:
    message = f"{path} cannot be used: {error.strerror or error}"
    return InvalidError(f"{message}; {advice}" if advice else message, resource="credentials")
