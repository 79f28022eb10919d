"""The state of one cache and every decision about it, without I/O: no clock, no await, no log, no torch."""

from kvleased.core.cache import Cache
from kvleased.core.shape import CacheShape

__all__ = ["Cache", "CacheShape"]
