"""What an engine's bytes are known by: its identity, the names made from it, and the keys of its blocks."""
