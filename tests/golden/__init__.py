"""Golden vectors: what a reference engine planned, in its words, and whether we plan the same."""
