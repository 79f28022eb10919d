"""Own which memory of a host pool is pinned, chunk by chunk; how it is pinned is its pinner's business.

One call over a large pool would hold up everyone who uses the driver, so it is pinned in chunks. What was pinned by two
calls is two ranges to the driver, and none of its copies may touch both, so copies are cut where chunks end.
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
    """What keeps pages of the host where they are."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin a range; raises InvalidError where it cannot be."""

    def unpin(self, address: int) -> None:
        """Undo that."""


class Pins:
    """The chunks of one host pool that are pinned, from its beginning on."""

    def __init__(self, pinner: Pinner, host: Region, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Take the pool, of which nothing is pinned yet."""
        self._pinner = pinner
        self._host = host
        self._chunk_bytes = chunk_bytes
        self._num_pinned = 0
        self._has_failed = False

    def __repr__(self) -> str:
        """Show life."""
        return f"<Pins {self.pinned_bytes} of {len(self._host)} bytes pinned>"

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned."""
        return min(len(self._host), self._num_pinned * self._chunk_bytes)

    @property
    def num_chunks(self) -> int:
        """How often `pin_next` has something to do."""
        return len(range(0, len(self._host), self._chunk_bytes))

    def pin_next(self) -> None:
        """Pin the next chunk; what cannot be pinned is copied by way of the driver's own memory, slowly."""
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
                advice="copies are slow; lower host_bytes, or raise the memory that may be locked",
            )
            return
        self._num_pinned += 1
        logs.line("info", "pinned", bytes=self.pinned_bytes, of_bytes=len(self._host))

    def sorted(self, spans: Spans, *, host_is_source: bool) -> Iterator[tuple[Spans, bool]]:
        """Yield the spans cut where chunks end, first those whose host end is pinned, then the others."""
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
        """Let go of what is pinned."""
        for chunk in range(self._num_pinned):
            self._pinner.unpin(self._host.ctypes.data + chunk * self._chunk_bytes)
        self._num_pinned = 0
