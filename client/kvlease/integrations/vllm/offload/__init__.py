"""Own the offload mode: vLLM's own offloading, with the daemon's tiers as its medium; `vllm` exports the names."""
