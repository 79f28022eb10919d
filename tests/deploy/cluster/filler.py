"""Fill a cache's device and host pools to the last block, in a worker's pod: filler.py DEVICE_BYTES HOST_BYTES."""

import json
import sys
import time

from kvlease import Client, FullAttention, PlanInputs

CACHE = "of-the-filler"
TOKENS_PER_BLOCK = 16
LAYERS = tuple(
    FullAttention(name=f"layers.{index}", num_kv_heads=8, head_size=128, dtype="float16")
    for index in range(4)
)


def main() -> None:
    """Write all blocks, have them moved to the host pool, write all blocks again, and say what the pools have."""
    device_bytes, host_bytes = map(int, sys.argv[1:])
    inputs = PlanInputs(
        layers=LAYERS,
        tokens_per_block=TOKENS_PER_BLOCK,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
    )
    with Client(on_doubt="raise", deadline_seconds=60) as client:
        while client.register(CACHE, inputs).status != "ready":
            time.sleep(0.1)
        with client.attach(CACHE, worker_name="filler") as worker:
            for prompt in (1, 2):
                num_tokens = worker.plan.num_blocks * TOKENS_PER_BLOCK
                tokens = [prompt * 10_000_000 + index for index in range(num_tokens)]
                keys = worker.keys.chain(tokens, TOKENS_PER_BLOCK)
                lease = worker.reserve(
                    str(prompt), num_tokens=num_tokens, keys=keys, wait_ms=30_000
                )
                with lease:
                    lease.map()
                    assert worker.device is not None
                    worker.device[:] = prompt
                    lease.commit(num_tokens, keys)
                if prompt == 1:
                    worker.evict(num_blocks=worker.plan.num_blocks, wait_ms=30_000)
        (cache,) = client.stats(CACHE).caches
        pools = {str(pool.tier): [pool.free, pool.num_blocks] for pool in cache.pools}
    sys.stdout.write(json.dumps(pools))


if __name__ == "__main__":
    main()
