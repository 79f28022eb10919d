"""Golden vectors: a reference engine's plans, in its words, and whether ours are the same."""
