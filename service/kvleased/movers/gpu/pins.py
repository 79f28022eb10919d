"""Own which memory of a host pool is pinned, chunk by chunk; the pinner owns how it is pinned.

One call for a large pool would hold up every process that uses the driver, so the pool is pinned in chunks. To the
driver, two chunks are two ranges, and no copy may touch both, so copies are cut where chunks end.
"""

from collections.abc import Iterator
from typing import Final, Protocol

from kvlease.errors import InvalidError
from kvleased.movers.pools import Region
from kvleased.movers.spans import Spans
from kvleased.telemetry import logs

CHUNK_BYTES: Final = 256 << 20
"""Bytes that are pinned in one go."""


class Pinner(Protocol):
    """What keeps pages of the host in place."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin a range; raise InvalidError if that is impossible."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""


class Pins:
    """The pinned chunks of one host pool, from its beginning on."""

    def __init__(self, pinner: Pinner, host: Region, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Take the pool; nothing of it is pinned yet."""
        self._pinner = pinner
        self._host = host
        self._chunk_bytes = chunk_bytes
        self._num_pinned = 0
        self._has_failed = False

    def __repr__(self) -> str:
        """Show how much is pinned."""
        return f"<Pins {self.pinned_bytes} of {len(self._host)} bytes pinned>"

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned."""
        return min(len(self._host), self._num_pinned * self._chunk_bytes)

    @property
    def num_chunks(self) -> int:
        """How many times `pin_next` has something to do."""
        return len(range(0, len(self._host), self._chunk_bytes))

    def pin_next(self) -> None:
        """Pin the next chunk; memory that cannot be pinned is copied slowly, by way of the driver's own memory."""
        if self._has_failed:
            return
        start = self._num_pinned * self._chunk_bytes
        num_bytes = min(self._chunk_bytes, len(self._host) - start)
        try:
            self._pinner.pin(self._host.ctypes.data + start, num_bytes)
        except InvalidError as error:
            self._has_failed = True
            logs.line(
                "warning",
                "host_pool_not_pinned",
                pinned_bytes=self.pinned_bytes,
                of_bytes=len(self._host),
                reason=str(error),
                advice="copies are slow; lower host_bytes, or raise the limit on locked memory",
            )
            return
        self._num_pinned += 1
        logs.line("info", "pinned", bytes=self.pinned_bytes, of_bytes=len(self._host))

    def sorted(self, spans: Spans, *, host_is_source: bool) -> Iterator[tuple[Spans, bool]]:
        """Yield the spans, cut where chunks end: first those whose host end is pinned, then the others."""
        if not len(spans):
            return
        origin = self._host.ctypes.data
        cut = spans.cut(origin, self._chunk_bytes, at_source=host_is_source)
        ends = cut.sources if host_is_source else cut.targets
        are_pinned = (ends - origin) // self._chunk_bytes < self._num_pinned
        for which, is_pinned in ((are_pinned, True), (~are_pinned, False)):
            if which.any():
                yield cut.where(which), is_pinned

    def close(self) -> None:
        """Unpin all chunks."""
        for chunk in range(self._num_pinned):
            self._pinner.unpin(self._host.ctypes.data + chunk * self._chunk_bytes)
        self._num_pinned = 0
