"""Own the play of vLLM's real scheduler and our real connectors over a daemon, sessions and ranks that are played."""
