"""Own every setting and limit of the daemon; nothing else reads arguments, the environment or a configuration file.

Precedence, highest first: command-line flags, environment variables `KVLEASED_*`, the TOML file named by `--config`,
the defaults below.
"""

import argparse
import difflib
import ipaddress
import os
import tempfile
import tomllib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MIB = 1 << 20
"""Bytes of a mebibyte."""
_PREFIX: Final = "KVLEASED_"
_SOCKETS: Final = ("kvlease.sock", "http.sock", "grpc.sock")
_SOCKET_PATH_BYTES_MAX: Final = 107
"""The longest path of a Unix socket in bytes: what `sockaddr_un` has, less the zero at its end."""
_SHOWN_MAX: Final = 40
"""Characters of a wrong value that are repeated."""
_TENANT_CHARACTERS_MAX: Final = 128
"""The longest name of a tenant, as attach takes it."""
_BYTES_MAX: Final = 1 << 60
"""More memory than any node has."""

Port = Annotated[int, Field(ge=0, le=65_535)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
TenantName = Annotated[str, Field(min_length=1, max_length=_TENANT_CHARACTERS_MAX)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def default_runtime_dir() -> Path:
    """Return the directory of the sockets: below XDG_RUNTIME_DIR where there is one, else private in /tmp."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base, "kvlease") if base else Path(tempfile.gettempdir(), f"kvlease-{os.getuid()}")


class TenantSettings(BaseModel):
    """What one tenant may have of the device pool of each cache; a tenant that is not named has the defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_percent: Percent = 0.0
    """Of the pool, which the tenant can always come to have."""
    max_percent: Percent = 100.0
    """Of the pool, which the tenant's bytes take at most, cached ones among them."""
    weight: float = Field(default=1.0, gt=0, le=1_000, allow_inf_nan=False)
    """Its share of the pool is its weight among those of the attached tenants; whoever is above it gives way first."""
    pinned_percent_max: Percent = 25.0
    """Of the pool, which pins hold of the tenant's at most."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_percent > self.max_percent:
            message = f"min_percent ({self.min_percent:g}) must be at most max_percent ({self.max_percent:g})"
            raise ValueError(message)
        return self


class Settings(BaseModel):
    """Every setting of `kvleased serve`; frozen once the process has started."""

    # Only the process that resolves the settings pays for building their validator.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    runtime_dir: Path = Field(
        default_factory=default_runtime_dir,
        validate_default=True,
        description="Directory of the Unix sockets; made with mode 0700, or private to this user already.",
    )
    listen_tcp: bool = Field(
        default=True, description="Whether REST and gRPC also listen on loopback TCP."
    )
    tcp_host: str = Field(
        default="127.0.0.1", description="Loopback address for TCP; no other is accepted."
    )
    http_port: Port = Field(default=7070, description="TCP port of REST; 0 takes any free port.")
    grpc_port: Port = Field(default=7071, description="TCP port of gRPC; 0 takes any free port.")
    serve_grpc: bool = Field(default=True, description="Whether gRPC is served at all.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least severe log events that are written."
    )

    device_bytes_default: int = Field(
        default=0,
        ge=0,
        le=_BYTES_MAX,
        description="Bytes of a device pool that names no number; 0 takes a quarter of the limit.",
    )
    memory_bytes_max: int = Field(
        default=0,
        ge=0,
        le=_BYTES_MAX,
        description="Bytes of all pools together; 0 takes 80 % of the cgroup's memory limit.",
    )
    populate_chunk_bytes: int = Field(
        default=64 * MIB,
        ge=MIB,
        le=_BYTES_MAX,
        description="Bytes of memory that are populated in one go.",
    )

    drain_seconds: float = Field(
        default=10.0,
        ge=0,
        le=3_600,
        allow_inf_nan=False,
        description="Seconds that SIGTERM waits for leases to end.",
    )
    tick_seconds: Seconds = Field(
        default=0.25, description="Seconds between two looks at the clock."
    )
    heartbeat_seconds: Seconds = Field(
        default=5.0, description="Seconds between a worker's heartbeats."
    )
    lease_seconds: Seconds = Field(
        default=30.0, description="Seconds after which a lease that was not renewed is quarantined."
    )
    ageing_seconds: Seconds = Field(
        default=5.0,
        description="Seconds after which a request that waits for blocks rises to the next priority.",
    )
    mover_seconds_max: Seconds = Field(
        default=30.0,
        description="Seconds that a mover may take for one batch before it is replaced.",
    )
    wait_ms_max: int = Field(
        default=60_000,
        ge=1,
        le=600_000,
        description="Milliseconds that a call may wait at most.",
    )
    copy_wait_ms: int = Field(
        default=10_000,
        ge=1,
        le=600_000,
        description="Milliseconds that evict and reload wait when the call names none.",
    )
    retry_after_ms: Count = Field(
        default=50, description="Milliseconds that a refusal tells the first caller to wait."
    )

    max_blocks_a_call: Count = Field(default=16_384, description="Block keys in one call.")
    max_tokens_hashed: Count = Field(
        default=131_072, description="Token ids in one reserve that brings no keys."
    )
    max_operations_a_step: Count = Field(default=8_192, description="Operations in one step.")
    max_message_bytes: Count = Field(
        default=1 * MIB, description="Bytes of one message on any transport."
    )
    max_connections: Count = Field(
        default=1_024, description="Connections of one transport at once."
    )
    max_calls_in_flight: Count = Field(
        default=64, description="Unanswered calls of one connection."
    )
    max_caches: Count = Field(default=16, description="Caches at once.")
    max_workers: Count = Field(default=256, description="Workers at once, over all caches.")
    max_leases: Count = Field(default=1_024, description="Leases of one cache at once.")
    max_waiting: Count = Field(
        default=256, description="Requests of one cache that wait for blocks at once."
    )
    max_pins: Count = Field(default=256, description="Pins of one cache at once.")
    max_events: Count = Field(default=4_096, description="Events that are kept for watchers.")
    max_watchers: Count = Field(default=64, description="Watchers at once.")
    max_remembered_replies: Count = Field(
        default=1_024, description="Replies that are remembered for retries, for each worker."
    )
    max_copies_a_batch: int = Field(
        default=4_096, ge=1, le=4_096, description="Block copies in one batch of a mover."
    )
    tenants: dict[TenantName, TenantSettings] = Field(
        default_factory=dict,
        description=(
            "Limits by tenant's name, as JSON or TOML tables with min_percent (0), max_percent (100), weight (1) and "
            "pinned_percent_max (25), all of the device pool; every other tenant has the values in parentheses."
        ),
    )

    @field_validator("runtime_dir", mode="before")
    @classmethod
    def _named(cls, directory: object) -> object:
        if directory == "":
            message = "it is empty; name a directory, or leave it out for the default"
            raise ValueError(message)
        return directory

    @field_validator("runtime_dir")
    @classmethod
    def _reachable(cls, directory: Path) -> Path:
        absolute = Path(os.path.abspath(directory))  # noqa: PTH100 - a link may be pointed elsewhere later
        longest = len(os.fsencode(absolute / max(_SOCKETS, key=len)))
        if longest > _SOCKET_PATH_BYTES_MAX:
            message = (
                f"the path of a socket in it would take {longest} bytes, and the kernel allows "
                f"{_SOCKET_PATH_BYTES_MAX}; name a directory with a path shorter by "
                f"{longest - _SOCKET_PATH_BYTES_MAX}"
            )
            raise ValueError(message)
        return absolute

    @field_validator("tcp_host")
    @classmethod
    def _loopback_only(cls, host: str) -> str:
        if not ipaddress.ip_address(host).is_loopback:
            message = "must be a loopback address, such as 127.0.0.1"
            raise ValueError(message)
        return host

    @model_validator(mode="after")
    def _beats_fit(self) -> Self:
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            message = (
                f"lease_seconds ({self.lease_seconds}) must be at least twice "
                f"heartbeat_seconds ({self.heartbeat_seconds})"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _minima_fit(self) -> Self:
        percent = sum(Fraction(str(tenant.min_percent)) for tenant in self.tenants.values())
        if percent > 100:  # noqa: PLR2004 - per cent
            message = f"the min_percent of all tenants add up to {float(percent):g}, which must be at most 100"
            raise ValueError(message)
        return self

    @property
    def local_socket(self) -> Path:
        """The socket that the library talks to on a node."""
        return self.runtime_dir / _SOCKETS[0]

    @property
    def http_socket(self) -> Path:
        """The Unix socket of REST."""
        return self.runtime_dir / _SOCKETS[1]

    @property
    def grpc_socket(self) -> Path:
        """The Unix socket of gRPC."""
        return self.runtime_dir / _SOCKETS[2]


def load(argv: Sequence[str]) -> Settings:
    """Resolve flags, environment and file to settings; exits with status 2 where they make no sense."""
    # Imported here: the control process gets resolved settings and must start quickly.
    from pydantic_settings import (  # noqa: PLC0415
        BaseSettings,
        CliSettingsSource,
        EnvSettingsSource,
        PydanticBaseSettingsSource,
        SettingsConfigDict,
        SettingsError,
        TomlConfigSettingsSource,
    )

    parser = _parser()
    # The file must be known before the sources are put together.
    config = _config_file(parser, argv)

    class Loaded(BaseSettings, Settings):
        """The same settings, read from their sources."""

        model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=_PREFIX)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            *_sources: PydanticBaseSettingsSource,
            **_named_sources: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            flags: CliSettingsSource[Any] = CliSettingsSource(
                settings_cls,
                cli_parse_args=list(argv),
                root_parser=parser,
                cli_kebab_case=True,
                cli_implicit_flags=True,
                cli_hide_none_type=True,
                cli_avoid_json=True,
            )
            sources: list[PydanticBaseSettingsSource] = [flags, EnvSettingsSource(settings_cls)]
            if config is not None:
                sources.append(TomlConfigSettingsSource(settings_cls, config))
            return tuple(sources)

    try:
        loaded = Loaded()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        parser.error(f"--config {config}: this is not TOML: {error}")
    except SettingsError:
        # Every other setting is a plain value.
        parser.error('tenants: this is no JSON such as {"chat": {"min_percent": 20}}')
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "settings"
        is_unknown = first["type"] == "extra_forbidden"
        parser.error(f"{where}: {_no_such(where) if is_unknown else _reason(first)}")
    return Settings.model_validate(loaded.model_dump())


def unknown_variables() -> dict[str, str]:
    """Return the variables of the environment that look like settings and are none, with what to say of each.

    They are ignored rather than refused: Kubernetes adds such names for a service that is called kvleased.
    """
    names = {name: name[len(_PREFIX) :].lower() for name in os.environ if _is_ours(name)}
    return {
        name: _no_such(setting, prefix=_PREFIX)
        for name, setting in sorted(names.items())
        if setting != "config" and setting not in Settings.model_fields
    }


class _Parser(argparse.ArgumentParser):
    """Says what is wrong before anything else, and where the settings are listed, without listing them."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists every setting.\n")


def _parser() -> _Parser:
    """Return the parser of the command line, to which the settings add their flags."""
    parser = _Parser(
        prog="kvleased serve",
        description="Run the KV-cache daemon of this node: a supervisor, the control process and a mover.",
        epilog="Each flag is also an environment variable, KVLEASED_ and its name in capitals, and a TOML key.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of settings, below flags and environment"
    )
    return parser


def _config_file(parser: argparse.ArgumentParser, argv: Sequence[str]) -> str | None:
    """Return the file that flags or environment name, which must be there."""
    scout = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scout.add_argument("--config")
    known, _ = scout.parse_known_args(argv)
    config: str | None = known.config or os.environ.get(f"{_PREFIX}CONFIG")
    if config is not None and not Path(config).is_file():
        parser.error(f"--config {config}: there is no such file")
    return config


def _reason(error: "ErrorDetails") -> str:
    """Say what is wrong with a value, and which it is."""
    message = error["msg"].removeprefix("Value error, ")
    is_ours = error["type"] == "value_error"
    return message if is_ours else f"{message}, not {str(error['input'])[:_SHOWN_MAX]}"


def _is_ours(variable: str) -> bool:
    return variable.upper().startswith(_PREFIX)


def _no_such(setting: str, prefix: str = "") -> str:
    """Say that there is no such setting, and which one was perhaps meant."""
    table, _, name = setting.rpartition(".")
    names = list(TenantSettings.model_fields) if table else [*Settings.model_fields, "config"]
    found = difflib.get_close_matches(name, names, n=1)
    meant = prefix + (found[0].upper() if prefix else found[0]) if found else ""
    return (
        f"there is no such setting; did you mean {meant}?" if meant else "there is no such setting"
    )
