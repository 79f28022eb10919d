"""Own one inference worker of the demo: it generates what it is told to, with its keys and values in the pool.

Orders come over standard input and events go over standard output, as JSON lines. A request may be
held after some token; the driver then evicts it, reloads it, kills what it likes, and says go.
"""

import json
import os
import sys
from typing import Any

import workload

import kvlease
from kvlease.integrations.transformers import LeasedCache, generate


def main() -> None:
    """Attach, serve orders until told to stop or until stdin ends, and detach."""
    address, name, device = sys.argv[1:]
    model = workload.build_model(device)
    with (
        kvlease.Client(address) as client,
        client.attach(workload.CACHE, worker_name=name) as worker,
    ):
        tell("ready", pid=os.getpid(), worker_id=worker.worker_id, epoch=worker.epoch)
        while (order := next_order())["do"] == "generate":
            made = generate(
                model,
                worker,
                order["token_ids"],
                max_new_tokens=order["max_new_tokens"],
                request_id=order["request_id"],
                on_step=Steps(order),
            )
            tell(
                "done",
                request_id=order["request_id"],
                epoch=worker.epoch,
                tokens=made.tokens,
                device_hit_tokens=made.device_hit_tokens,
                host_hit_tokens=made.host_hit_tokens,
                computed_tokens=made.computed_tokens,
                recomputed_tokens=made.recomputed_tokens,
                recomputes=made.recomputes,
            )
    tell("stopped")


class Steps:
    """What happens between two tokens of a request: progress, and holding it where the driver wants to interfere."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._request_id = order["request_id"]
        self._hold_at = order.get("hold_at")
        self._places: list[int] = []

    def __call__(self, cache: LeasedCache | None, num_new: int) -> None:
        """Tell how far the request is; where it is to be held, follow orders until one says go."""
        tell("step", request_id=self._request_id, num_new=num_new)
        if num_new != self._hold_at:
            return
        self._hold_at = None
        tell("held", num_blocks=len(cache.lease.block_ids) if cache else 0)
        while (order := next_order())["do"] != "go":
            if cache is None:
                tell("refused")
            elif order["do"] == "evict":
                self._places = cache.lease.block_ids.tolist()
                tell("evicted", num_blocks=cache.evict())
            else:
                num_tokens = cache.reload()
                places = cache.lease.block_ids.tolist()
                num_moved = sum(
                    here != there for here, there in zip(places, self._places, strict=True)
                )
                tell("reloaded", num_tokens=num_tokens, num_blocks=len(places), num_moved=num_moved)


def tell(event: str, **facts: object) -> None:
    """Write one event."""
    print(json.dumps({"event": event, **facts}), flush=True)


def next_order() -> dict[str, Any]:
    """Read one order; the end of stdin is an order to stop."""
    line = sys.stdin.readline()
    return json.loads(line) if line else {"do": "stop"}


if __name__ == "__main__":
    main()
