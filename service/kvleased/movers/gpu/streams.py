"""Own how a GPU is given copies: two streams, the driver's batched copy if it has one, and events that are polled.

No callback of the driver ever runs Python. A failure of the driver is not handled: the mover ends, and the next mover
begins with a sound context.
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

from kvlease.cuda import checked, in_context, load_driver
from kvleased.memory.cuda import Gpu
from kvleased.movers.spans import Spans

COPIES_A_CALL_MAX: Final = 4096
"""Copies in one call of the driver."""
_BATCHED_SINCE: Final = 12080
"""The version of the driver that has cuMemcpyBatchAsync: CUDA 12.8."""


class Event(Protocol):
    """An event of cuda-core."""

    @property
    def is_done(self) -> bool:
        """Whether everything before it has been carried out."""


class GpuStream:
    """One queue of work of a GPU; any thread may give it some."""

    def __init__(self, gpu: Gpu, handle: Any, *, is_batched: bool) -> None:
        """Take a stream of cuda-core."""
        self._gpu = gpu
        self._handle = handle
        self._is_batched = is_batched

    def copy(self, spans: Spans, *, is_pinned: bool) -> None:
        """Copy every span, in any order; if memory of the host is not pinned, the call may wait for the copies.

        Raises:
            InvalidError: the driver refuses; some spans may have been copied.
        """
        if not len(spans):
            return
        with in_context(self._gpu.device):
            if is_pinned and self._is_batched:
                for start in range(0, len(spans), COPIES_A_CALL_MAX):
                    self._copy_batch(spans, start)
            else:
                self._copy_each(spans)

    def zero(self, spans: Spans) -> None:
        """Fill the targets with zeros.

        Raises:
            InvalidError: the driver refuses.
        """
        driver, stream = load_driver(), self._handle.handle
        with in_context(self._gpu.device):
            for target, num_bytes in zip(
                spans.targets.tolist(), spans.num_bytes.tolist(), strict=True
            ):
                checked("cuMemsetD8Async", driver.cuMemsetD8Async(target, 0, num_bytes, stream))

    def mark(self) -> Event:
        """Return the place behind all work given so far."""
        with in_context(self._gpu.device):
            event: Event = self._handle.record()
        return event

    def _copy_batch(self, spans: Spans, start: int) -> None:
        driver = load_driver()
        targets, sources, sizes = (
            column[start : start + COPIES_A_CALL_MAX].tolist()
            for column in (spans.targets, spans.sources, spans.num_bytes)
        )
        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        checked(
            "cuMemcpyBatchAsync",
            driver.cuMemcpyBatchAsync(
                list(map(driver.CUdeviceptr, targets)),
                list(map(driver.CUdeviceptr, sources)),
                sizes,
                len(sizes),
                [attributes],
                [0],
                1,
                self._handle.handle,
            ),
        )

    def _copy_each(self, spans: Spans) -> None:
        driver, stream = load_driver(), self._handle.handle
        columns = (spans.targets.tolist(), spans.sources.tolist(), spans.num_bytes.tolist())
        for target, source, num_bytes in zip(*columns, strict=True):
            checked("cuMemcpyAsync", driver.cuMemcpyAsync(target, source, num_bytes, stream))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStreams:
    """The two queues of one GPU."""

    urgent: GpuStream
    """Work that a request waits for: copies towards the device, and work on it; it goes before other work there."""
    others: GpuStream
    """Copies towards the host, which only write back."""

    @classmethod
    def opened(cls, gpu: Gpu) -> Self:
        """Make both queues.

        Raises:
            InvalidError: the driver refuses.
        """
        from cuda.core import Device, StreamOptions  # noqa: PLC0415 - only where there is a GPU

        driver, device = load_driver(), Device(gpu.device.ordinal)
        device.set_current()
        least, most = checked("cuCtxGetStreamPriorityRange", driver.cuCtxGetStreamPriorityRange())
        version = checked("cuDriverGetVersion", driver.cuDriverGetVersion())

        def made(priority: int) -> GpuStream:
            options = StreamOptions(nonblocking=True, priority=priority)
            stream = device.create_stream(options=options)
            return GpuStream(gpu, stream, is_batched=version >= _BATCHED_SINCE)

        return cls(urgent=made(most), others=made(least))
