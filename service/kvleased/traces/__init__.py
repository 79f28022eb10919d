"""Own what policies would find of the keys that a cache is asked for: of a trace, and of those that come live."""

from kvleased.traces.policies import BELADY, POLICIES
from kvleased.traces.simulate import default_sizes, simulate

__all__ = ["BELADY", "POLICIES", "default_sizes", "simulate"]
