"""Own how values travel to a Mooncake Store, whatever is in them.

Its library runs threads of its own, may block for seconds when its master is gone, and knows no deadlines: `bounded`
sets them. An empty answer and an error both mean that there is no value.
"""

import ctypes
import faulthandler
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Self

from kvlease.geometry import round_up
from kvleased.config.addresses import RemoteUrl
from kvleased.movers.remote.store import CALL_BYTES_MAX, RemoteError, advised
from kvleased.movers.remote.value import Value, ValueParts
from kvleased.telemetry import logs

_BUFFER_BYTES_DEFAULT: Final = 64 << 20
_PEER_TO_PEER: Final = "P2PHANDSHAKE"
"""Says that there is no metadata server, and that clients ask each other."""
_JOIN_SECONDS_MAX: Final = 5.0
_TRIAL: Final = """
import os, sys
from kvleased.supervision.processes import die_with
die_with(int(sys.argv[4]))
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
code = client.setup(sys.argv[1], sys.argv[2], 0, 1 << 20, "tcp", "", sys.argv[3])
os._exit(0 if code == 0 else 1)
"""
_MASTER_GONE: Final = -900
_BUFFER_TOO_SMALL: Final = -600
"""The code of a value that does not fit into its buffer, but not of that alone."""
_CHECK_MASTER: Final = "check that the master of remote_url runs, and the network to it"
_CHECK_MEMORY: Final = (
    "lower segment_bytes or buffer_bytes in remote_url, or raise the limit of locked memory"
)
_NO_MEMORY: Final = -200
_LEND_MORE: Final = "raise segment_bytes in remote_url, here or on other nodes"
_SECONDS_BETWEEN_REFUSALS: Final = 60.0
_PROBE_NAME: Final = "kvlease:probe"


class MooncakeStore:
    """One client of a Mooncake master, with memory of its own through which values are copied."""

    def __init__(self, client: Any, staging: mmap.mmap) -> None:
        """Take a client of the library, which has no types, and memory that it may write to."""
        self._client = client
        self._staging = memoryview(staging)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(staging))
        self._tell_again_at = 0.0

    @classmethod
    def opened(cls, url: RemoteUrl) -> Self:
        """Join the cluster.

        Raises:
            RemoteError: the library cannot be loaded, or the cluster was not joined.
        """
        # The library's log lines are not our events; anybody who wants them sets this variable.
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise RemoteError(
                f"kvlease[mooncake] cannot be loaded: {error}; install it, and the libraries that it names"
            ) from None
        host = url.options.get("host") or _own_address(url)
        metadata = url.options.get("metadata", _PEER_TO_PEER)
        master = f"{url.host}:{url.port}"
        _try_to_join(host, metadata, master)
        client = MooncakeDistributedStore()
        sizes = (url.number("segment_bytes", 0), url.number("buffer_bytes", _BUFFER_BYTES_DEFAULT))
        # While the library joins, it lets no other thread run, and that takes minutes if the master goes away just
        # then.
        with Path(os.devnull).open("w") as nowhere:
            faulthandler.dump_traceback_later(_JOIN_SECONDS_MAX, exit=True, file=nowhere)
            code = client.setup(host, metadata, *sizes, "tcp", "", master)
            faulthandler.cancel_dump_traceback_later()
        if code != 0:
            client.close()
            raise RemoteError(
                advised(f"the master at {url} could not be joined (code {code})", _CHECK_MASTER)
            )
        store = cls(client, mmap.mmap(-1, CALL_BYTES_MAX))
        store._register()
        return store

    def __repr__(self) -> str:
        """Show the bytes of staging memory."""
        return f"<MooncakeStore {len(self._staging)} bytes of staging>"

    def exists(self, names: Sequence[str], value_bytes: int) -> bytes:  # noqa: ARG002 - it cannot tell their bytes
        """Return a byte for each name, 1 if it has a value."""
        codes = self._client.batch_is_exist(list(names))
        if any(code < 0 for code in codes):
            raise RemoteError(
                advised(f"the master does not answer (code {min(codes)})", _CHECK_MASTER)
            )
        return bytes(code == 1 for code in codes)

    def get(self, names: Sequence[str], value_bytes: int) -> Sequence[Value | None]:
        """Return views of the staging memory, valid until the next call; None for a value that is missing.

        Of a value that is too long there is an empty view, of one that is too short all that it has.
        """
        values: list[Value | None] = []
        self._stage(len(names) * value_bytes)
        addresses = [self._address + position * value_bytes for position in range(len(names))]
        codes = self._client.batch_get_into(list(names), addresses, [value_bytes] * len(names))
        for position, (name, code) in enumerate(zip(names, codes, strict=True)):
            start = position * value_bytes
            if code == _BUFFER_TOO_SMALL and self._client.get_size(name) > value_bytes:
                code = 0  # noqa: PLW2901 - it is there, and none of it can be used
            values.append(self._staging[start : start + code] if code >= 0 else None)
        if codes and all(code == _MASTER_GONE for code in codes):
            raise RemoteError(
                advised(f"the master does not answer (code {_MASTER_GONE})", _CHECK_MASTER)
            )
        return values

    def put(self, names: Sequence[str], values: Sequence[ValueParts]) -> bytes:
        """Store values whose names are free; return a byte for each, 1 if it has a value now."""
        sizes = [len(header) + len(slot) for header, slot in values]
        ends = list(accumulate(sizes))
        self._stage(ends[-1] if ends else 0)
        for (header, slot), end in zip(values, ends, strict=True):
            slot_start = end - len(slot)
            self._staging[slot_start - len(header) : slot_start] = header
            self._staging[slot_start:end] = slot
        addresses = [
            self._address + end - num_bytes for end, num_bytes in zip(ends, sizes, strict=True)
        ]
        codes = self._client.batch_put_from(list(names), addresses, sizes)
        if codes and all(code == _MASTER_GONE for code in codes):
            raise RemoteError(
                advised(f"the master does not answer (code {_MASTER_GONE})", _CHECK_MASTER)
            )
        self._tell_refused(codes)
        return bytes(code == 0 for code in codes)

    def _tell_refused(self, codes: Sequence[int]) -> None:
        """Log why values were not taken, now and then: a full store that evicts takes some and refuses others."""
        refused = next((code for code in codes if code != 0), 0)
        now = time.monotonic()
        if not refused or now < self._tell_again_at:
            return
        self._tell_again_at = now + _SECONDS_BETWEEN_REFUSALS
        reason = f"the master takes no value (code {refused})"
        if refused == _NO_MEMORY:
            reason = advised(f"no client has lent memory for more (code {refused})", _LEND_MORE)
        logs.line("warning", "remote_puts_refused", reason=reason)

    def drop(self, names: Sequence[str]) -> None:
        """Have values forgotten, by force: otherwise the master keeps those that were read just now, as these were."""
        self._client.batch_remove(list(names), True)

    def ping(self) -> None:
        """Check that the master answers: the library's own check still says yes long after the master has gone."""
        self.exists([_PROBE_NAME], 0)

    @property
    def advice(self) -> str:
        """What to do if a call takes too long: empty, as nothing is known."""
        return ""

    def cut(self) -> None:
        """Do nothing: no call of the library can be ended from outside."""

    def close(self) -> None:
        """Leave the cluster; other clients lose the values that they read from this client's segment."""
        self._client.close()

    def _stage(self, num_bytes: int) -> None:
        """Make the staging memory large enough for a call; it grows only if a single value is larger."""
        if num_bytes <= len(self._staging):
            return
        staging = mmap.mmap(-1, round_up(num_bytes, mmap.PAGESIZE))
        self._client.unregister_buffer(self._address)
        self._staging = memoryview(staging)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(staging))
        self._register()

    def _register(self) -> None:
        code = self._client.register_buffer(self._address, len(self._staging))
        if code != 0:
            raise RemoteError(
                advised(f"the memory could not be registered (code {code})", _CHECK_MEMORY)
            )


def _try_to_join(host: str, metadata: str, master: str) -> None:
    """Try, in a process that can be killed, whether the master lets clients join.

    Raises:
        RemoteError: it does not, or not in time.
    """
    command = [sys.executable, "-P", "-c", _TRIAL, host, metadata, master, str(os.getpid())]
    try:
        trial = subprocess.run(  # noqa: S603 - our own program
            command, check=False, timeout=_JOIN_SECONDS_MAX, capture_output=True
        )
    except subprocess.TimeoutExpired:
        raise RemoteError(
            advised(f"the master at {master} does not answer", _CHECK_MASTER)
        ) from None
    if trial.returncode != 0:
        raise RemoteError(advised(f"the master at {master} could not be joined", _CHECK_MASTER))


def _own_address(url: RemoteUrl) -> str:
    """Return the address of this machine that the master sees; finding it sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            url.host, url.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RemoteError(
            f"{url} cannot be reached: {error.strerror}; check its host and port"
        ) from None
