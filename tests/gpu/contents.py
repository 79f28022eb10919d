"""A GPU's bytes as tests see them: each look is a copy, and returns only when that has ended."""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlease import Worker
from kvlease.memory.cuda import DeviceMemory
from kvleased.memory.cuda import Gpu
from kvleased.movers.gpu.streams import GpuStreams
from kvleased.movers.spans import Spans


def read(memory: DeviceMemory, start: int = 0, num_bytes: int | None = None) -> NDArray[np.uint8]:
    """Return some bytes of a GPU."""
    found = np.empty(len(memory) - start if num_bytes is None else num_bytes, np.uint8)
    _copy(memory, memory.address + start, found.ctypes.data, len(found))
    return found


def write(memory: DeviceMemory, content: NDArray[np.uint8], start: int = 0) -> None:
    """Write some bytes of a GPU."""
    content = np.ascontiguousarray(content)
    _copy(memory, content.ctypes.data, memory.address + start, content.nbytes)


class Rows:
    """The device region of a worker, one row a block; it is indexed as an array is, but nothing is a view."""

    def __init__(self, worker: Worker) -> None:
        assert worker.gpu is not None
        self._memory = worker.gpu
        self._shape = (worker.plan.num_blocks, worker.plan.bytes_per_block)

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        return read(self._memory).reshape(self._shape)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        places = np.arange(self._shape[0] * self._shape[1]).reshape(self._shape)
        for row in np.unique(places[index] // self._shape[1]).tolist():
            changed = read(self._memory).reshape(self._shape)
            changed[index] = value
            write(self._memory, changed[row], row * self._shape[1])


def _copy(memory: DeviceMemory, source: int, target: int, num_bytes: int) -> None:
    stream = GpuStreams.opened(Gpu(memory.device, 1)).others
    spans = Spans(np.array([source]), np.array([target]), np.array([num_bytes]))
    stream.copy(spans, is_pinned=False)
    mark = stream.mark()
    while not mark.is_done:
        time.sleep(0.0001)
