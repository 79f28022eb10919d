"""Own TLS: what the servers need for it, and which role a client's certificate gives."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from kvleased.directories import UnusableError
from kvleased.roles import Role

NAME_PREFIX: Final = "kvlease-"
"""A certificate whose common name is this and a role's word gives that role."""
_ROLES: Final = {
    f"{NAME_PREFIX}{role.value}": role for role in (Role.READER, Role.JOINER, Role.OPERATOR)
}


class TlsSettings(Protocol):
    """Which settings are read here."""

    @property
    def tls_cert_file(self) -> Path | None:
        """The chain of the server's certificate; None serves without TLS."""
        ...

    @property
    def tls_key_file(self) -> Path | None:
        """Its key."""
        ...

    @property
    def tls_client_ca_file(self) -> Path | None:
        """Who signs clients' certificates; None asks for none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of a server's certificate, and of who may sign its clients'."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None

    def context(self) -> ssl.SSLContext:
        """Return the context of a server: TLS 1.2 at least, and clients' certificates where an authority is named.

        Raises:
            UnusableError: a file cannot be read, or does not fit the others.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
            if self.client_ca_file is not None:
                context.load_verify_locations(self.client_ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            reason = error.strerror or str(error)
            message = f"TLS cannot be served with {self.cert_file} and {self.key_file}: {reason}"
            raise UnusableError(message) from error
        return context


def tls_files(settings: TlsSettings) -> TlsFiles | None:
    """Return the files of the settings; None where TCP goes without TLS."""
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    return TlsFiles(
        cert_file=settings.tls_cert_file,
        key_file=settings.tls_key_file,
        client_ca_file=settings.tls_client_ca_file,
    )


def role_of_name(common_name: str) -> Role:
    """Return the role that the common name of a verified certificate gives; a stranger's where it names none."""
    return _ROLES.get(common_name, Role.STRANGER)


def role_in(certificate: dict[str, Any]) -> Role:
    """Return the role that a verified certificate gives, as the ssl module describes it."""
    for part in certificate.get("subject", ()):
        for name, value in part:
            if name == "commonName":
                return role_of_name(value)
    return Role.STRANGER
