"""Serve with the daemon's pool below vLLM's own cache: what is computed once is found by every later engine.

Start a daemon with `make serve`, then run this twice with vLLM 0.32's Python: `python examples/vllm/offload.py MODEL`.
"""

from serving import main

if __name__ == "__main__":
    main("KVLeaseOffloadingConnector", pool_bytes=512 << 20)
