"""Serve from the daemon's memory: the next life of the engine finds its whole cache, and no byte is copied.

Start a daemon with `make serve`, then run this twice with vLLM 0.32's Python: `python examples/vllm/owned.py MODEL`.
"""

from serving import main

if __name__ == "__main__":
    main("KVLeaseOwnedConnector")
