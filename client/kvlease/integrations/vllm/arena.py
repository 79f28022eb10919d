"""Own how an engine's one KV allocation is answered with existing memory; callers decide whose memory it is."""

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from kvlease.geometry import ceil_div
from kvlease.integrations.vllm.mapping import open_descriptor
from kvlease.memory.mapped import Identity

_logger: Final = logging.getLogger(__name__)

_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class ArenaContext(TorchFunctionMode):
    """Answer the one allocation of a KV cache with existing memory, whose bytes are kept; pass on all other calls.

    vLLM allocates a rank's cache as one zeroed buffer of bytes and lays every layer over it, so an allocation of
    exactly as many bytes is the cache. The memory is handed out once.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """Lend a one-dimensional tensor of int8, which must have exactly as many bytes as the engine will ask for."""
        super().__init__()
        self._memory = memory
        self.is_taken = False
        """Whether the engine's cache lies in the memory."""

    def __repr__(self) -> str:
        """Show life: the number of bytes, and whether they are in use."""
        state = "taken" if self.is_taken else "not taken"
        return f"<ArenaContext {self._memory.numel()} bytes, {state}>"

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer a call of `zeros` for exactly as many bytes with the memory."""
        kwargs = kwargs or {}
        if func is torch.zeros and not self.is_taken and self._is_wanted(args, kwargs):
            self.is_taken = True
            return self._memory
        return func(*args, **kwargs)

    def _is_wanted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        device = torch.device(kwargs.get("device") or "cpu")
        return (
            args == (self._memory.numel(),)
            and kwargs.get("dtype") == torch.int8
            and device.type == self._memory.device.type
        )


def arena_tensor(region: NDArray[np.uint8]) -> torch.Tensor:
    """Return a mapped region of host memory as the tensor that an engine would have allocated; no byte is copied."""
    return torch.from_numpy(region.view(np.int8))


def lies_within(tensor: torch.Tensor, arena: torch.Tensor) -> bool:
    """Tell whether a tensor's storage is the arena's."""
    return tensor.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr()


def parted(arena: torch.Tensor, memory: Identity) -> bool:
    """Make a rank's part of the daemon's pool private to this engine, in place; return whether that worked.

    A failure is logged.
    """
    (device,) = ((device, inode) for kind, device, inode in memory if kind == "device")
    try:
        part_from_others(arena, device)
    except OSError as error:
        _logger.error(  # noqa: TRY400 - the system's own words are enough
            "The daemon's memory cannot be made private to this engine: %s. Requests that need more blocks than the "
            "engine has wait forever: restart the engine.",
            error,
            extra={"action": "part"},
        )
        return False
    return True


def part_from_others(arena: torch.Tensor, memory: tuple[int, int]) -> None:
    """Make mapped memory private to this process, in place: it keeps its bytes, and nobody else sees later writes.

    A page is copied when it is first written. In pages not written yet, writes of others still show, so others must not
    write what is read here. `memory` is the device and inode of the memory, which is mapped from its start and kept
    open by the map itself.

    Raises:
        OSError: the memory is no longer open, or the system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    # A map covers whole pages, including the last one.
    num_bytes = ceil_div(arena.numel(), mmap.PAGESIZE) * mmap.PAGESIZE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    descriptor = open_descriptor(memory)
    if libc.mmap(arena.data_ptr(), num_bytes, protection, flags, descriptor, 0) == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
