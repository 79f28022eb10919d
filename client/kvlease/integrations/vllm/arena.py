"""Own how an engine's one KV allocation becomes memory that is there already; whose it is, is the caller's matter."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode


class ArenaContext(TorchFunctionMode):
    """Answer the one allocation of a KV cache with existing memory, bytes kept; all other calls go on as they are.

    vLLM allocates the cache of a rank as one zeroed buffer of bytes and lays every layer over it, so a buffer of just
    as many bytes is the cache. It is handed out once.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """Lend a one-dimensional tensor of int8, whose bytes must be exactly those that the engine will ask for."""
        super().__init__()
        self._memory = memory
        self.is_taken = False
        """Whether the engine's cache lies in the memory."""

    def __repr__(self) -> str:
        """Show life: how many bytes, and whether they are in use."""
        state = "taken" if self.is_taken else "not taken"
        return f"<ArenaContext {self._memory.numel()} bytes, {state}>"

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer `zeros` of as many bytes with the memory."""
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
    """Tell whether a tensor's storage is that of the arena."""
    return tensor.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr()
