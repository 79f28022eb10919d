"""Own TLS: the files that servers need for it, and the role that a client's certificate gives."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from kvlease.credentials import ask_for_no_phrase
from kvleased.access.roles import Role
from kvleased.system.directories import UnusableError

NAME_PREFIX: Final = "kvlease-"
"""A certificate gives a role if its common name is this prefix and the role's word."""
_ROLES: Final = {
    f"{NAME_PREFIX}{role.value}": role for role in (Role.READER, Role.JOINER, Role.OPERATOR)
}

_VERSION: Final = 0xA0
"""The tag of a certificate's version, which certificates of the oldest kind lack."""
_UTC_TIME: Final = 0x17
"""The tag of a time whose year has two digits; times from 2050 on have four digits and another tag."""


class TlsSettings(Protocol):
    """The settings that are read here."""

    @property
    def tls_cert_file(self) -> Path | None:
        """The chain of the server's certificate; None serves without TLS."""
        ...

    @property
    def tls_key_file(self) -> Path | None:
        """The key of that certificate."""
        ...

    @property
    def tls_client_ca_file(self) -> Path | None:
        """The authority that signs clients' certificates; None asks clients for none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of a server's certificate, and of the authority that signs its clients' certificates."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None

    def context(self) -> ssl.SSLContext:
        """Return the context of a server: at least TLS 1.2, and with clients' certificates if an authority is named.

        Raises:
            UnusableError: a file cannot be read, or does not fit the others.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        with _told_of(self.cert_file):
            # Read here first, because OpenSSL does not say which of the two is missing.
            self.cert_file.read_bytes()
        with _told_of(self.key_file):
            self.key_file.read_bytes()
        with _told_of(self.cert_file, self.key_file):
            context.load_cert_chain(self.cert_file, self.key_file, ask_for_no_phrase)
        if self.client_ca_file is not None:
            with _told_of(self.client_ca_file):
                context.load_verify_locations(self.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def expires_at(self) -> float | None:
        """Return when the certificate ends, or the last authority if that is earlier; None if none can be read."""
        ends = [expires_at(self.cert_file)]
        if self.client_ca_file is not None:
            ends.append(
                max((found.ends_at for found in validities(self.client_ca_file)), default=None)
            )
        return min((end for end in ends if end is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """The time in which a certificate is valid: from one second since 1970 to another, both included."""

    begins_at: float
    ends_at: float


def validity(cert_file: Path) -> Validity | None:
    """Return when the first certificate of a PEM file is valid; None if it cannot be read."""
    return next(validities(cert_file), None)


def validities(cert_file: Path) -> Iterator[Validity]:
    """Yield when each certificate of a PEM file is valid, up to the first one that cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        pem = cert_file.read_text("ascii", "replace")
        while ssl.PEM_HEADER in pem:
            begin, end = pem.index(ssl.PEM_HEADER), pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
            yield _validity(ssl.PEM_cert_to_DER_cert(pem[begin:end]))
            pem = pem[end:]


def expires_at(cert_file: Path) -> float | None:
    """Return the second since 1970 at which the first certificate of a PEM file ends; None if it cannot be read."""
    found = validity(cert_file)
    return None if found is None else found.ends_at


@contextmanager
def _told_of(*files: Path) -> Iterator[None]:
    """Turn the failure of what uses files into one that names them."""
    try:
        yield
    except OSError as error:
        names, reason = " and ".join(map(str, files)), error.strerror or error
        raise UnusableError(f"TLS cannot be served with {names}: {reason}") from error


def _validity(der: bytes) -> Validity:
    """Return the times of a certificate's validity, which X.509 has as the fourth or fifth element."""
    _, certificate = _value(der, 0)
    _, signed = _value(certificate, 0)
    place = 0
    if signed[0] == _VERSION:
        place = _end(signed, place)
    for _ in ("serial number", "algorithm", "issuer"):
        place = _end(signed, place)
    _, times = _value(signed, place)
    return Validity(begins_at=_second(times, 0), ends_at=_second(times, _end(times, 0)))


def _second(times: bytes, place: int) -> float:
    tag, text = _value(times, place)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _value(der: bytes, place: int) -> tuple[int, bytes]:
    """Return the tag and the bytes of the DER value that begins at a place."""
    begin, end = _bounds(der, place)
    return der[place], der[begin:end]


def _end(der: bytes, place: int) -> int:
    return _bounds(der, place)[1]


def _bounds(der: bytes, place: int) -> tuple[int, int]:
    begin, length = place + 2, der[place + 1]
    if length & 0x80:
        num_bytes = length & 0x7F
        length = int.from_bytes(der[begin : begin + num_bytes])
        begin += num_bytes
    return begin, begin + length


def tls_files(settings: TlsSettings) -> TlsFiles | None:
    """Return the TLS files of the settings; None if TCP goes without TLS."""
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    return TlsFiles(
        cert_file=settings.tls_cert_file,
        key_file=settings.tls_key_file,
        client_ca_file=settings.tls_client_ca_file,
    )


def role_of_name(common_name: str) -> Role:
    """Return the role that the common name of a verified certificate gives; STRANGER if it names no role."""
    return _ROLES.get(common_name, Role.STRANGER)


def role_in(certificate: dict[str, Any]) -> Role:
    """Return the role that a verified certificate gives; the ssl module has described the certificate."""
    for part in certificate.get("subject", ()):
        for name, value in part:
            if name == "commonName":
                return role_of_name(value)
    return Role.STRANGER
