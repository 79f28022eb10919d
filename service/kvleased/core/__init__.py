"""The state of one cache and every decision about it, without I/O: no clock, no await, no log, no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvleased.core.cache import Cache
    from kvleased.core.shape import CacheShape

__all__ = ["Cache", "CacheShape"]


def __getattr__(name: str) -> Any:
    """Import the modules that decide only when somebody asks for one: a mover needs none of them, and starts sooner."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{'cache' if name == 'Cache' else 'shape'}")
    return getattr(module, name)
