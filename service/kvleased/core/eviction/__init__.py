"""Policies that decide which cached block leaves first: one policy a file, all behind one contract."""

from kvleased.core.eviction.classes import ClassedLRU
from kvleased.core.eviction.lru import LeafFirstLRU
from kvleased.core.eviction.order import EvictionOrder

__all__ = ["ClassedLRU", "EvictionOrder", "LeafFirstLRU"]
