"""Own a connector's settings, which vLLM passes as `kv_connector_extra_config`."""

import logging
import os
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvlease._runtime import ADDRESS_VARIABLE
from kvlease.errors import InvalidError
from kvlease.options import CacheOptions
from kvlease.transports.base import default_address, parse_address

_logger: Final = logging.getLogger(__name__)

VLLM_SETTINGS: Final = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "canonical_layout",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
    }
)
"""Names in the extra config that vLLM's offloading itself reads."""
VLLM_TRUTHS: Final = frozenset(
    {"canonical_layout", "offload_prompt_only", "self_describing_kv_events"}
)
"""Those of them that are true or false; vLLM takes any text but an empty one for true, even "false"."""
_PRODUCER: Final = "kv_producer"
_LOCAL: Final = "unix://"
_NUMBERS: Final = (
    *("pool_bytes", "host_bytes", "disk_bytes", "remote_bytes", "magazine_blocks"),
    *("deadline_ms", "retry_seconds", "start_seconds", "populate_seconds"),
)
_TIERS: Final = ("host_bytes", "disk_bytes", "remote_bytes")
_WITHOUT_EFFECT: Final[Mapping[str, tuple[str, ...]]] = {
    "offload": (),
    "owned": ("pool_bytes", *_TIERS, "magazine_blocks", "stats", "write_policy"),
    "shared": ("pool_bytes", *_TIERS, "stats", "write_policy"),
}
"""Settings that have no effect in a mode."""


class ConnectorSettings(BaseModel):
    """Settings of one connector, the same in every process of an engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    socket: str = ""
    """The daemon's address, or the path of its local socket, which may be relative to the engine's working directory;
    if empty, KVLEASE_ADDRESS, or else the user's default address."""
    cache: str = Field("", max_length=63)
    """The cache's name; if empty, one made of mode, model and identity, so that only equal engines share a cache."""
    tenant: str = Field("default", min_length=1, max_length=128)
    """The tenant whose blocks are shared; blocks that one tenant computes are never found by another."""
    weights: str = Field("", max_length=256)
    """A text that identifies the weights, such as a digest; if empty, the model's commit or files identify them.

    It also stands for the files of a draft model and for the scales of an image encoder.
    """
    adapters: str = Field("", max_length=256)
    """A text that identifies the adapters (LoRA), such as their revision; if empty, what an engine with adapters
    computes is found again by that engine alone, for as long as it lives."""
    pool_bytes: int = Field(0, ge=0)
    """Bytes of the daemon's pool that blocks are offloaded to; 0 means four times the engine's own cache."""
    host_bytes: int = Field(0, ge=0)
    """Bytes of the host pool below that pool."""
    disk_bytes: int = Field(0, ge=0)
    """Bytes of the disk store."""
    remote_bytes: int = Field(0, ge=0)
    """Bytes of the remote store."""
    deadline_ms: float = Field(250, ge=1, le=60_000)
    """Milliseconds after which a hook goes on without the daemon's answer."""
    retry_seconds: float = Field(2, gt=0, le=3_600)
    """Seconds between tries to reach a daemon that did not answer; hooks do not wait for these tries."""
    start_seconds: float = Field(5, gt=0, le=3_600)
    """Seconds that an engine's start waits for the daemon before the engine goes on without it."""
    populate_seconds: float = Field(120, ge=0, le=3_600)
    """Seconds that an engine's start waits while the daemon makes the cache's memory."""
    verify: bool = True
    """Whether blocks are checksummed when they leave the pool and verified when they come back."""
    write_policy: Literal["", "on-evict", "write-through", "after-n-hits"] = ""
    """When blocks are copied to the tiers below; if empty, the daemon's default."""
    eviction_policy: Literal["", "leaf-lru", "arc", "s3-fifo", "lfu", "adaptive"] = ""
    """Which blocks leave the pool first; if empty, the daemon's default."""
    magazine_blocks: int = Field(0, ge=0)
    """Private blocks that an engine keeps in stock, offload or shared; 0 means what two steps need."""
    stats: bool = True
    """Whether loads and stores are among vLLM's own statistics."""

    @classmethod
    def read(cls, extra: Mapping[str, Any] | None, others: Collection[str] = ()) -> Self:
        """Read the settings from the extra config; `others` are the names in it that vLLM itself reads.

        Raises:
            InvalidError: a name is unknown or a value is out of range; the message names all of them.
        """
        given = dict(extra or {})
        wrong = [
            f"{name}: Input should be true or false, without quotation marks, not {value!r}"
            for name, value in given.items()
            if name in VLLM_TRUTHS and name in others and isinstance(value, str)
        ]
        settings = None
        try:
            settings = cls(**{name: given[name] for name in given if name not in others})
        except ValidationError as error:
            wrong += [
                f"{'.'.join(map(str, one['loc']))}: {_said(one, others)}" for one in error.errors()
            ]
        if settings is None or wrong:
            message = f"kv_connector_extra_config: {'; '.join(wrong)}"
            raise InvalidError(message, resource="settings")
        settings._check_address()
        return settings

    def without_effect(self, mode: str) -> list[str]:
        """Return the names of the settings that are set to something but have no effect in a mode."""
        fields = type(self).model_fields
        return [
            name for name in _WITHOUT_EFFECT[mode] if getattr(self, name) != fields[name].default
        ]

    def of_mode(self, mode: str) -> Self:
        """Return the settings without those that have no effect in a mode, so that they cost no memory."""
        fields = type(self).model_fields
        return self.model_copy(
            update={name: fields[name].default for name in _WITHOUT_EFFECT[mode]}
        )

    @property
    def address(self) -> str:
        """The daemon's address."""
        written = f"{_LOCAL}{self.socket}" if self.socket.startswith("/") else self.socket
        return str(parse_address(written or default_address()))

    @property
    def local_address(self) -> str:
        """The daemon's address, which must be a local socket, as only a local socket hands memory over.

        Raises:
            InvalidError: the address is not a local socket's.
        """
        if not self.address.startswith(_LOCAL):
            message = (
                "the daemon hands over its memory only through its local socket; set `socket` to that, such as "
                f"/run/kvlease/kvlease/kvlease.sock, instead of {self.address}"
            )
            raise InvalidError(message, resource="socket")
        return self.address

    def _check_address(self) -> None:
        """Refuse a malformed address now, naming the setting or variable that it comes from."""
        try:
            self.address  # noqa: B018
        except InvalidError as error:
            where = "kv_connector_extra_config: socket" if self.socket else ADDRESS_VARIABLE
            raise InvalidError(f"{where}: {error.message}", resource="socket") from None

    @field_validator("socket")
    @classmethod
    def _absolute(cls, value: str) -> str:
        """Make a path absolute, so that it stays right if the working directory changes; no shell has seen its ~."""
        if not value or "://" in value:
            return value
        # What os.path cannot expand, it leaves as it is.
        return str(Path(os.path.expanduser(value)).absolute())  # noqa: PTH111 -- pathlib raises then

    @field_validator(*_NUMBERS, mode="before")
    @classmethod
    def _no_truth(cls, value: object) -> object:
        """Refuse true and false, which would count as 1 and 0."""
        if isinstance(value, bool):
            raise ValueError("Input should be a number, not true or false")  # noqa: TRY004 - pydantic's
        return value

    @property
    def deadline_seconds(self) -> float:
        """The deadline of a hook's call, in seconds."""
        return self.deadline_ms / 1000

    @property
    def options(self) -> CacheOptions:
        """The options that the cache is registered with."""
        return CacheOptions(
            integrity="xxh3" if self.verify else "none",
            write_policy=self.write_policy,
            eviction_policy=self.eviction_policy,
        )


def _said(error: Mapping[str, Any], others: Collection[str]) -> str:
    """Return what is wrong with a setting, and for a name that is unknown, the nearest one."""
    if error["type"] != "extra_forbidden":
        return str(error["msg"])
    known = [*ConnectorSettings.model_fields, *others]
    close = get_close_matches(str(error["loc"][0]), known, 1)
    meant = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
    return f"there is no such setting; {meant}"


def require_role(kv_role: str | None) -> None:
    """Refuse the role in which vLLM frees the blocks of a request while steps under way may still write them.

    vLLM keeps such blocks back only for connectors that load, as a load is in no order with such a step.

    Raises:
        InvalidError: the engine is to produce only; the message names the role to set.
    """
    if kv_role == _PRODUCER:
        message = (
            f"kv_role is {_PRODUCER}, with which vLLM frees blocks that steps under way may still write, so that "
            "what is loaded there may be overwritten; set it to kv_both, also in MultiConnector's own settings"
        )
        raise InvalidError(message, resource="kv_role", rule="produces_only")


def require_recompute(policy: str) -> None:
    """Refuse a MultiConnector with whose own policy a load that fails fails its request.

    Raises:
        InvalidError: that is so; the message names the setting and where it belongs.
    """
    if policy != "recompute":
        message = (
            f"kv_load_failure_policy is {policy} in MultiConnector's own settings, by which vLLM goes, so that a load "
            "that fails would fail its request; set it to recompute there, beside kv_role"
        )
        raise InvalidError(message, resource="kv_load_failure_policy", rule="fails_requests")


def require_chunks(blocks_per_chunk: int, tokens_per_block: Collection[int]) -> None:
    """Refuse chunks of several blocks where groups have blocks of different sizes.

    There a load may begin within a chunk of a window, at a block that was outside the window when the chunk was stored;
    nothing would tell that the chunk does not have it.

    Raises:
        InvalidError: the groups' `tokens_per_block` differ, and a chunk has several blocks.
    """
    sizes = sorted(set(tokens_per_block))
    if blocks_per_chunk > 1 and len(sizes) > 1:
        message = (
            f"a chunk has {blocks_per_chunk} blocks, and this model has blocks of {', '.join(map(str, sizes))} "
            "tokens; leave out block_size and blocks_per_chunk, so that a chunk is one block"
        )
        raise InvalidError(message, resource="blocks_per_chunk", need=1, limit=1)


def recompute_failed_loads(transfer: Any) -> None:
    """Make requests whose load fails compute their blocks; by default vLLM fails such requests.

    The scheduler reads the policy after it has made its connector.
    """
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        _logger.warning(
            "kv_load_failure_policy is set to recompute, because a failing cache must not make requests fail.",
            extra={"action": "policy"},
        )
