"""Own the settings of the listeners beside the local socket: addresses, TLS, tokens, and time limits for peers."""

import ipaddress
from itertools import combinations
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from kvleased.config.strict_numbers import StrictNumbers

NETWORK_PATHS: Final = (
    "tls_cert_file", "tls_key_file", "tls_client_ca_file",
    "operator_token_file", "joiner_token_file", "reader_token_file",
)  # fmt: skip
"""The settings of this module that are paths; all may be left out."""

Port = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class NetworkSettings(StrictNumbers):
    """A part of the settings of `kvleased serve`."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    listen_tcp: bool = Field(
        default=True, description="Whether REST and gRPC also listen on loopback TCP."
    )
    tcp_host: str = Field(
        default="127.0.0.1",
        description=(
            "Address for TCP. An address beyond loopback needs tls_cert_file and tls_key_file, or "
            "insecure_tcp_without_tls."
        ),
    )
    tls_cert_file: Path | None = Field(
        default=None,
        description="PEM file of the certificate and its chain, for TLS over TCP. None by default: no TLS.",
    )
    tls_key_file: Path | None = Field(
        default=None, description="PEM file of the private key of tls_cert_file."
    )
    tls_client_ca_file: Path | None = Field(
        default=None,
        description=(
            "PEM file of the authority that signs clients' certificates. With it, a client without a certificate "
            "cannot connect. A certificate with the common name kvlease-reader, kvlease-joiner or kvlease-operator "
            "gives that role; other clients need tokens."
        ),
    )
    insecure_tcp_without_tls: bool = Field(
        default=False,
        description=(
            "Whether TCP beyond loopback may go without TLS. Anyone who can read the network can then read tokens, and "
            "do what their owners can."
        ),
    )
    operator_token_file: Path | None = Field(
        default=None,
        description=(
            "File of the token that makes a caller over TCP an operator. By default `operator.token` in runtime_dir. "
            "If the file is missing, it is made, with mode 0600."
        ),
    )
    joiner_token_file: Path | None = Field(
        default=None,
        description="The same for callers that may register caches and attach to them. By default `joiner.token`.",
    )
    reader_token_file: Path | None = Field(
        default=None,
        description="The same for callers that may look at everything and change nothing. By default `reader.token`.",
    )
    http_port: Port = Field(default=7070, description="TCP port of REST; 0: any free port.")
    grpc_port: Port = Field(default=7071, description="TCP port of gRPC; 0: any free port.")
    probe_host: str = Field(
        default="",
        description=(
            "Address, such as 0.0.0.0, or :: to include IPv6, where anyone who reaches it may read /livez, /readyz, "
            "/startupz and /metrics, without TLS. Nothing else is served there. None by default."
        ),
    )
    probe_port: Port = Field(
        default=7072, description="TCP port of the probes at probe_host; 0: any free port."
    )
    serve_grpc: bool = Field(default=True, description="Whether gRPC is served at all.")
    head_seconds_max: Seconds = Field(
        default=10.0,
        description=(
            "Seconds within which a request's head or a frame must arrive in full, counted from its first byte or from "
            "the start of the connection. A TLS handshake gets as many. After that, the connection is closed."
        ),
    )
    body_seconds_max: Seconds = Field(
        default=10.0,
        description="Seconds within which a request's body must arrive in full, counted from its head.",
    )
    idle_seconds_max: Seconds = Field(
        default=75.0,
        description="Seconds that a REST or gRPC connection may be idle, or leave an answer unread.",
    )

    @field_validator("tcp_host")
    @classmethod
    def _checked_host(cls, host: str) -> str:
        return _address(host)

    @model_validator(mode="after")
    def _tls_beyond_loopback(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            message = "tls_cert_file and tls_key_file must be set together; set both, or neither"
            raise ValueError(message)
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            message = "tls_client_ca_file needs tls_cert_file and tls_key_file"
            raise ValueError(message)
        is_open = self.listen_tcp and not ipaddress.ip_address(self.tcp_host).is_loopback
        if is_open and self.tls_cert_file is None and not self.insecure_tcp_without_tls:
            message = (
                f"tcp_host is {self.tcp_host}, which other machines can reach; set tls_cert_file and tls_key_file, or "
                "use a loopback address such as 127.0.0.1"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _ports_of_their_own(self) -> Self:
        ports = {}
        if self.listen_tcp:
            ports["http_port"] = (self.tcp_host, self.http_port)
            if self.serve_grpc:
                ports["grpc_port"] = (self.tcp_host, self.grpc_port)
        if self.probe_host:
            ports["probe_port"] = (self.probe_host, self.probe_port)
        for (one, (host, port)), (other, (other_host, other_port)) in combinations(
            ports.items(), 2
        ):
            if port and port == other_port and host == other_host:
                message = f"{one} and {other} are both {port}; set a different port for each, or 0 for any free port"
                raise ValueError(message)
        return self

    @field_validator("probe_host")
    @classmethod
    def _address_or_none(cls, host: str) -> str:
        return _address(host) if host else host


def _address(host: str) -> str:
    """Return an IP address in its usual form.

    Raises:
        ValueError: the text is no IP address; names are not looked up.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError as error:
        message = f"it is {host[:40]!r}; write an IPv4 or IPv6 address such as 127.0.0.1 or ::1"
        raise ValueError(message) from error
