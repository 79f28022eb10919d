"""Own the settings and limits of the daemon, with units and defaults; `sources` reads them."""

import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, field_validator, model_validator

from kvlease._runtime import runtime_directory
from kvlease.disk_file import file_bytes
from kvleased.access.roles import Role
from kvleased.config.addresses import check_address
from kvleased.config.network_settings import NETWORK_PATHS, NetworkSettings, Seconds
from kvleased.config.setting_kinds import BYTES_MAX, WRITTEN, Bytes, Count, TenantName
from kvleased.config.tenant_settings import TenantSettings, check_minima
from kvleased.supervision.silence import SECONDS_MIN

MIB = 1 << 20
"""Bytes of a mebibyte."""
_SOCKETS: Final = ("kvlease.sock", "http.sock", "grpc.sock")
_SECRET: Final = "secret"  # noqa: S105 -- a name
"""The file of the root secret in a directory that outlives the container."""
_OPTIONAL_PATHS: Final = ("host_dir", "disk_dir", "secret_file", "trace_file", *NETWORK_PATHS)
"""The settings that are paths and may be left out."""
PATHS: Final = ("runtime_dir", *_OPTIONAL_PATHS)
"""The settings that are paths, for which JSON has no type."""
_SOCKET_PATH_BYTES_MAX: Final = 107
"""The longest path of a Unix socket in bytes: the room in `sockaddr_un`, without the zero at its end."""


class Settings(NetworkSettings):
    """Every setting of `kvleased serve`; frozen once the process has started."""

    # Deferred, so that only the process that resolves the settings pays for building their validator.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    runtime_dir: Path = Field(
        default_factory=runtime_directory,
        validate_default=True,
        description="Directory of the Unix sockets. It is made with mode 0700, or is private to this user already.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least severe log events to write."
    )

    device: str = Field(
        default="cpu",
        description=(
            "Where device pools are: cpu, or a GPU such as cuda:0, as CUDA_VISIBLE_DEVICES counts; needs "
            "kvlease[cuda]."
        ),
    )
    device_bytes_default: Bytes = Field(
        default=0,
        description=(
            "Bytes of a device pool that is given no size; 0: a quarter of the memory limit, of memory_bytes_max if "
            "that is less, or of the GPU."
        ),
    )
    memory_bytes_max: Bytes = Field(
        default=0,
        description=(
            "Bytes that all pools may take together, except those on a GPU; 0: 80 % of the cgroup's memory limit."
        ),
    )
    populate_chunk_bytes: Annotated[int, WRITTEN] = Field(
        default=64 * MIB,
        ge=MIB,
        le=BYTES_MAX,
        description="Bytes of memory that are populated at a time.",
    )

    host_dir: Path | None = Field(
        default=None,
        description=(
            "Private directory on tmpfs or hugetlbfs for host pools, so that they outlive the container. None by "
            "default: host pools are in the daemon's own memory."
        ),
    )
    disk_dir: Path | None = Field(
        default=None, description="Private directory of the disk stores. None by default."
    )
    disk_bytes_max: Bytes = Field(
        default=0,
        description="Bytes that all disk stores may take together; 0: 80 % of the file system of disk_dir.",
    )
    remote_url: str = Field(
        default="",
        repr=False,
        description=(
            "Address of the remote store: redis://, rediss://, unix:// or mooncake://. If it has a password, give it "
            "by environment or file. None by default."
        ),
    )
    remote_ttl_seconds: int = Field(
        default=0,
        ge=0,
        le=366 * 86_400,
        description=(
            "Seconds for which the remote store keeps a block after it was stored or last loaded; 0: until the room is "
            "needed."
        ),
    )
    remote_ms_max: int = Field(
        default=250,
        ge=1,
        le=60_000,
        description="Milliseconds that one call to the remote store may take. A later answer is a miss.",
    )
    secret_file: Path | None = Field(
        default=None,
        description=(
            "File of 32 random bytes from which block keys are derived, the same on all nodes that share a remote "
            "store; made if it is missing. By default `secret` in disk_dir or host_dir, else new with each start."
        ),
    )

    trace_endpoint: str = Field(
        default="",
        pattern="^(https?://[^ ]+)?$",
        description=(
            "OTLP endpoint that spans are sent to over HTTP, such as http://127.0.0.1:4318; needs kvlease[otel]. None "
            "by default."
        ),
    )
    trace_file: Path | None = Field(
        default=None,
        description="File that spans are appended to, one JSON object per line; needs kvlease[otel]. None by default.",
    )

    drain_seconds: float = Field(
        default=10.0,
        ge=0,
        le=3_600,
        allow_inf_nan=False,
        description="Seconds that the daemon waits for leases to end after SIGTERM.",
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
    control_silent_seconds_max: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description=(
            "Seconds without a sign of life after which the control process is killed and started again; 0: never."
        ),
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
        description="Milliseconds that an evict, a reload or a fork waits if the call names no time.",
    )
    retry_after_ms: Count = Field(
        default=50, description="Milliseconds that a refusal tells the first caller to wait."
    )

    max_blocks_a_call: Count = Field(default=16_384, description="Block keys in one call.")
    max_tokens_hashed: Count = Field(
        default=131_072, description="Token ids in one reserve that brings no keys."
    )
    max_operations_a_step: Count = Field(default=8_192, description="Operations in one step.")
    max_message_bytes: Annotated[Count, WRITTEN] = Field(
        default=1 * MIB, description="Bytes of one message on any transport."
    )
    max_connections: Count = Field(
        default=1_024, description="Connections of one listener at once; more are turned away."
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
    max_tenants: Count = Field(default=256, description="Tenants with limits of their own at once.")
    max_pins: Count = Field(default=256, description="Pins of one cache at once.")
    max_events: Count = Field(default=4_096, description="Events that are kept for watchers.")
    max_watchers: Count = Field(default=64, description="Watchers at once.")
    key_counts_bytes_max: Bytes = Field(
        default=64 * MIB,
        description=(
            "Bytes that the key counts of all tenants may take together. Key counts tell workers what is surely not "
            "cached; workers without them must ask. 0: none."
        ),
    )
    max_remembered_replies: Count = Field(
        default=1_024, description="Replies that are remembered for retries, for each worker."
    )
    max_copies_a_batch: int = Field(
        default=4_096, ge=1, le=4_096, description="Block copies in one batch of a mover."
    )
    tenants: dict[TenantName, TenantSettings] = Field(
        default_factory=dict,
        description=(
            "Limits by tenant name, as JSON or TOML tables with min_percent (0), max_percent (100), weight (1), "
            "pinned_percent_max (25), min_bytes (0), max_bytes (0: none) of the device pool, and leases_max (0: none). "
            "A tenant that is not named has the values in parentheses."
        ),
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch("cpu|cuda:[0-9]{1,2}", device):
            message = f"it is {device[:40]!r}; write cpu, or a GPU and its number, such as cuda:0"
            raise ValueError(message)
        return device

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
                f"the path of a socket in it would have {longest} bytes, but the kernel allows "
                f"{_SOCKET_PATH_BYTES_MAX}; name a directory whose path is at least {longest - _SOCKET_PATH_BYTES_MAX} "
                "bytes shorter"
            )
            raise ValueError(message)
        return absolute

    @field_validator(*_OPTIONAL_PATHS, mode="before")
    @classmethod
    def _none_if_empty(cls, path: object) -> object:
        return None if path == "" else path

    @field_validator(*_OPTIONAL_PATHS)
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else Path(os.path.abspath(path))  # noqa: PTH100 - see above

    @field_validator("remote_url", mode="before")
    @classmethod
    def _known_address(cls, url: object) -> object:
        return check_address(url)

    @field_validator("trace_endpoint")
    @classmethod
    def _with_a_host(cls, url: str) -> str:
        try:
            is_whole = not url or bool(urlsplit(url).hostname and urlsplit(url).port != 0)
        except ValueError:
            is_whole = False
        if not is_whole:
            message = (
                "it has no host, or a port beyond 1 to 65535; write it like http://127.0.0.1:4318"
            )
            raise ValueError(message)
        return url

    @field_validator("control_silent_seconds_max")
    @classmethod
    def _longer_than_beats(cls, seconds: float) -> float:
        if 0 < seconds < SECONDS_MIN:
            message = f"it is {seconds:g}; set 0 for never, or at least {SECONDS_MIN:g}: life is shown once a second"
            raise ValueError(message)
        return seconds

    @model_validator(mode="after")
    def _beats_fit(self) -> Self:
        lease_seconds, heartbeat_seconds = self.lease_seconds, self.heartbeat_seconds
        if lease_seconds < 2 * heartbeat_seconds:
            message = f"lease_seconds ({lease_seconds}) must be at least twice heartbeat_seconds ({heartbeat_seconds})"
            raise ValueError(message)
        if self.tick_seconds > lease_seconds:
            message = (
                f"tick_seconds ({self.tick_seconds}) must be at most lease_seconds ({lease_seconds}), because leases "
                "and waits end at a tick"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _directories_differ(self) -> Self:
        names = ("runtime_dir", "host_dir", "disk_dir")
        directories = {name: getattr(self, name) for name in names}
        named: dict[Path, str] = {}
        for name, directory in directories.items():
            if directory is not None and directory in named:
                message = f"{named[directory]} and {name} are the same directory; name another for one of them"
                raise ValueError(message)
            if directory is not None:
                named[directory] = name
        return self

    @model_validator(mode="after")
    def _default_fits(self) -> Self:
        if not self.is_on_gpu and 0 < self.memory_bytes_max < self.device_bytes_default:
            message = (
                f"device_bytes_default ({self.device_bytes_default}) must be at most "
                f"memory_bytes_max ({self.memory_bytes_max})"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _disk_has_room(self) -> Self:
        least = file_bytes(1, 1)
        if 0 < self.disk_bytes_max < least:
            message = (
                f"disk_bytes_max ({self.disk_bytes_max}) has no room for even one slot; it must be at least {least}, "
                "and is best many times as much, or 0 for 80 % of the file system"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _tenants_fit(self) -> Self:
        check_minima(self.tenants)
        if len(self.tenants) > self.max_tenants:
            message = f"max_tenants ({self.max_tenants}) must be at least the {len(self.tenants)} tenants with limits"
            raise ValueError(message)
        return self

    @property
    def is_on_gpu(self) -> bool:
        """Whether device pools are memory of a GPU."""
        return self.device != "cpu"

    @property
    def token_paths(self) -> dict[Role, Path]:
        """The files of the tokens for callers over TCP, by role; none if TCP is off."""
        if not self.listen_tcp:
            return {}
        return {
            Role.OPERATOR: self.operator_token_file or self.runtime_dir / "operator.token",
            Role.JOINER: self.joiner_token_file or self.runtime_dir / "joiner.token",
            Role.READER: self.reader_token_file or self.runtime_dir / "reader.token",
        }

    @property
    def secret_path(self) -> Path | None:
        """The file of the root secret; None if no directory with cached blocks outlives the container."""
        if self.secret_file is not None:
            return self.secret_file
        directory = self.disk_dir or self.host_dir
        return None if directory is None else directory / _SECRET

    @property
    def other_secret_path(self) -> Path | None:
        """A second file of the same secret, so that either directory may be added or left out later; None for none."""
        if self.secret_file is not None or self.disk_dir is None or self.host_dir is None:
            return None
        return self.host_dir / _SECRET

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
