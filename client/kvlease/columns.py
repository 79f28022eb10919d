"""Own how columns lie in shared memory; what the columns hold is others' business.

The columns of a region follow each other, each aligned to a cache line.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.geometry import ALIGNMENT_BYTES, round_up

Column = tuple[str, type[np.generic], int]
"""Name, element type and elements per entry of a column."""

Buffer = memoryview | bytearray | bytes | NDArray[np.uint8]
"""A buffer that columns can be laid over."""


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Columns of `num_entries` entries each, one after another."""

    columns_in_order: tuple[Column, ...]
    num_entries: int

    @property
    def region_bytes(self) -> int:
        """Bytes of a region that holds all columns: the sum of round_up(column, 64)."""
        return sum(
            round_up(self._column_bytes(column), ALIGNMENT_BYTES)
            for column in self.columns_in_order
        )

    def columns(self, buffer: Buffer, start_bytes: int = 0) -> dict[str, NDArray[Any]]:
        """Lay the columns over `buffer`, from `start_bytes` on; columns with several elements per entry are 2-D.

        Raises:
            InvalidError: the buffer is too short.
        """
        view = memoryview(buffer.data if isinstance(buffer, np.ndarray) else buffer).cast("B")
        if len(view) < start_bytes + self.region_bytes:
            message = f"the region holds {len(view)} bytes, but its columns need {start_bytes + self.region_bytes}"
            raise InvalidError(
                message,
                resource="region_bytes",
                need=start_bytes + self.region_bytes,
                available=len(view),
            )
        arrays: dict[str, NDArray[Any]] = {}
        offset = start_bytes
        for column in self.columns_in_order:
            name, dtype, width = column
            flat = np.frombuffer(view, dtype, count=self.num_entries * width, offset=offset)
            arrays[name] = flat if width == 1 else flat.reshape(self.num_entries, width)
            offset += round_up(self._column_bytes(column), ALIGNMENT_BYTES)
        return arrays

    def _column_bytes(self, column: Column) -> int:
        _, dtype, width = column
        return self.num_entries * width * np.dtype(dtype).itemsize
