"""What is noted of requests, and what eviction policies would make of it: how many keys they would find."""

from kvleased.traces.policies import BELADY, POLICIES
from kvleased.traces.simulate import default_sizes, simulate

__all__ = ["BELADY", "POLICIES", "default_sizes", "simulate"]
