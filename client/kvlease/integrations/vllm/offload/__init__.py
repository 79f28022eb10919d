"""Own the offload mode: vLLM's own offloading, with the daemon's tiers as its medium; its names are the package's."""
