"""Own how a GPU is given copies: two streams, the driver's batched copy if it has one, and events that are polled.

No callback of the driver ever runs Python. A failure of the driver is not handled: the mover ends, and the next mover
begins with a sound context.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol, Self

import numpy as np

from kvlease.memory.cuda import checked, in_context, load_driver
from kvleased.memory.cuda import Gpu
from kvleased.movers.spans import Spans

COPIES_A_CALL_MAX: Final = 512
"""Copies in one call of the driver, which begins none before it has read them all: the bus waits for long lists."""
_BATCHED: Final = b"cuMemcpyBatchAsync"
_BATCHED_SINCE: Final = 12080
"""The version whose form of that call is used: CUDA 12.8, the first to have it."""

BatchedCopy = Callable[..., int]
"""The driver's call: addresses of targets, sources and sizes, their number, attributes, which of them, the number of
attributes, where to write the index of a copy that is refused, and the stream."""
_BATCHED_FORM: Final = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p),
)


class Event(Protocol):
    """An event of cuda-core."""

    @property
    def is_done(self) -> bool:
        """Whether everything before it has been carried out."""


class GpuStream:
    """One queue of work of a GPU; any thread may give it some."""

    def __init__(self, gpu: Gpu, handle: Any, batched: BatchedCopy | None) -> None:
        """Take a stream of cuda-core, and the driver's call for many copies if it has one."""
        self._gpu = gpu
        self._handle = handle
        self._batched = batched

    def copy(self, spans: Spans, *, is_pinned: bool) -> None:
        """Copy every span, in any order; if memory of the host is not pinned, the call may wait for the copies.

        Raises:
            InvalidError: the driver refuses; some spans may have been copied.
        """
        if not len(spans):
            return
        with in_context(self._gpu.device):
            if is_pinned and self._batched is not None:
                self._copy_batched(spans, self._batched)
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

    def _copy_batched(self, spans: Spans, batched: BatchedCopy) -> None:
        driver = load_driver()
        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        # The bindings would make an object of each address, which takes as long as the driver's own work.
        columns = [
            np.ascontiguousarray(column, np.int64)
            for column in (spans.targets, spans.sources, spans.num_bytes)
        ]
        first, refused = ctypes.c_size_t(0), ctypes.c_size_t(0)
        for start in range(0, len(spans), COPIES_A_CALL_MAX):
            count = min(COPIES_A_CALL_MAX, len(spans) - start)
            result = batched(
                *(column[start:].ctypes.data for column in columns),
                count,
                attributes.getPtr(),
                ctypes.addressof(first),
                1,
                ctypes.addressof(refused),
                int(self._handle.handle),
            )
            checked(_BATCHED.decode(), (driver.CUresult(result),))

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

        def made(priority: int) -> GpuStream:
            options = StreamOptions(nonblocking=True, priority=priority)
            stream = device.create_stream(options=options)
            return GpuStream(gpu, stream, batched_copy())

        return cls(urgent=made(most), others=made(least))


@cache
def batched_copy() -> BatchedCopy | None:
    """Return the driver's call for many copies, or None if the driver is older than CUDA 12.8."""
    driver = load_driver()
    flags = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    error, address, *_ = driver.cuGetProcAddress(_BATCHED, _BATCHED_SINCE, flags)
    # An older driver refuses a version that is newer than its own.
    return _BATCHED_FORM(int(address)) if not int(error) and address else None
