"""Own the owned mode: an engine's KV cache is the daemon's memory, and so outlives the engine."""
