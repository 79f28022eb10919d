"""Own the compiled loops over blocks; `loops.lua` is what LuaJIT compiles, and `rows` has the same loops in Python.

They call the C library's memcpy, and the very functions of XXH3 that xxhash calls. While one runs, other threads of
the interpreter run, too.
"""

import ctypes
import mmap
import threading
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.movers.rows import CHUNK_BYTES, Loops, Part, Pool, PythonLoops, Runs
from kvleased.telemetry import logs

_XXH3: Final = (
    "XXH3_createState",
    "XXH3_64bits",
    "XXH3_64bits_reset",
    "XXH3_64bits_update",
    "XXH3_64bits_digest",
)
_DISPATCHED: Final = "_dispatch"
"""What the name of a function ends in that looks first what the processor can do; there is none on Arm."""


def loops() -> Loops:
    """Return this thread's loops, which are compiled unless that is impossible here."""
    if not hasattr(_OF_THREAD, "loops"):
        _OF_THREAD.loops = _made()
    made: Loops = _OF_THREAD.loops
    return made


class CompiledLoops:
    """Loops over blocks as machine code. Each thread needs its own: what one thread calls, no other one may."""

    def __init__(self) -> None:
        """Have the loops read; each is compiled when it has run some fifty turns.

        Raises:
            ImportError: there is no LuaJIT.
            AttributeError: xxhash was built so that its functions cannot be found.
            OSError: this process may not make memory executable; LuaJIT would end it.
        """
        from lupa.luajit21 import LuaRuntime  # noqa: PLC0415 - only where there is one

        lua = LuaRuntime(unpack_returned_tuples=True, register_eval=False, register_builtins=False)
        libc = ctypes.CDLL(None, use_errno=True)
        _make_code(libc)
        memcpy = _address_of(libc, "memcpy")
        library = ctypes.CDLL(import_module("xxhash._xxhash").__file__)
        xxh3 = lua.table_from({name: _address_of(library, name) for name in _XXH3})
        loops = files(__package__).joinpath("loops.lua").read_text()
        self._copy, self._copy_and_sum, self._sum = lua.execute(loops, memcpy, xxh3, CHUNK_BYTES)

    def copy(self, parts: Sequence[Part], runs: Runs) -> None:
        """Copy the blocks of each run, part by part."""
        table = _table_of(parts)
        self._copy(_at(table), len(table), *_arguments(runs))

    def copy_and_sum(self, parts: Sequence[Part], runs: Runs) -> NDArray[np.uint64]:
        """Copy the blocks of each run, and return the xxh3 of each block's summed parts."""
        table, sums = _table_of(parts), np.empty(runs.num_blocks, np.uint64)
        self._copy_and_sum(_at(table), len(table), *_arguments(runs), _at(sums))
        return sums

    def sum(self, rows: Pool, ids: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return the xxh3 of each of these rows."""
        sums = np.empty(len(ids), np.uint64)
        self._sum(_at(rows), rows.strides[0], rows.shape[1], _at(ids), len(ids), _at(sums))
        return sums


def _make_code(libc: ctypes.CDLL) -> None:
    """Make a page executable that was written, as LuaJIT does; systemd or SELinux may forbid that.

    Raises:
        OSError: it is forbidden.
    """
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        executable = mmap.PROT_READ | mmap.PROT_EXEC
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(page)), executable):
            raise OSError(ctypes.get_errno(), "memory cannot be made executable")


def _address_of(library: ctypes.CDLL, name: str) -> int:
    function = getattr(library, name + _DISPATCHED, None) or getattr(library, name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _table_of(parts: Sequence[Part]) -> NDArray[np.int64]:
    """Return [parts, 6]: the fields of `part_t`."""
    rows = [
        (
            _at(part.source),
            part.source.strides[0],
            _at(part.target),
            part.target.strides[0],
            part.target.shape[1],
            part.is_summed,
        )
        for part in parts
    ]
    return np.array(rows, np.int64).reshape(-1, 6)


def _arguments(runs: Runs) -> tuple[int, int, int, int]:
    return _at(runs.sources), _at(runs.targets), _at(runs.counts), len(runs.counts)


def _at(array: NDArray[np.generic]) -> int:
    return array.ctypes.data


def _made() -> Loops:
    try:
        return CompiledLoops()
    except (ImportError, AttributeError, OSError) as error:
        _tell(str(error))
        return PythonLoops()


@cache
def _tell(error: str) -> None:
    """Log, once in this process for one reason, that copies are slower than they could be."""
    logs.line(
        "warning",
        "loops_not_compiled",
        error=error,
        advice="copies of small blocks take half as long again; for faster ones install lupa and xxhash as pip does, "
        "and let this process execute memory that it wrote (systemd: MemoryDenyWriteExecute=no)",
    )


_OF_THREAD: Final = threading.local()
