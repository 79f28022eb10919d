"""The invariants of a cache as code: each function returns what does not hold, in words."""
