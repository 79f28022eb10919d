"""Serve from one pool with other engines of the same model: what one computes is a hit in the others.

Start a daemon with `make serve`, then run this in several terminals: `python examples/vllm/shared.py MODEL`.
"""

from serving import main

if __name__ == "__main__":
    main("KVLeaseSharedConnector")
