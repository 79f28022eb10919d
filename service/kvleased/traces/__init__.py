"""Own the simulation of eviction policies: how many of a trace's keys, or of live keys, they would find."""

from kvleased.traces.policies import BELADY, POLICIES
from kvleased.traces.simulate import default_sizes, simulate

__all__ = ["BELADY", "POLICIES", "default_sizes", "simulate"]
