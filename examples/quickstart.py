"""Reserve blocks twice for the same prompt: the first time they are computed, the second time they are cached.

Start a daemon with `make serve`, then run `.venv/bin/python examples/quickstart.py`.
"""

from kvlease import Client, FullAttention, PlanInputs

LAYERS = tuple(
    FullAttention(name=f"layer.{index}", num_kv_heads=2, head_size=64, dtype="float16")
    for index in range(4)
)
INPUTS = PlanInputs(layers=LAYERS, tokens_per_block=16, device_blocks=64, host_bytes=4 << 20)


def main() -> None:
    """Serve one prompt twice."""
    tokens = list(range(100))
    with Client() as client:
        client.register("example", INPUTS)
        with client.attach("example") as worker:
            plan = worker.plan
            keys = worker.keys.chain(tokens, plan.tokens_per_block)
            for request_id in ("first", "second"):
                # The reserve may have to wait for room, which copies to the host pool make.
                with worker.reserve(
                    request_id, keys=keys, num_tokens=len(tokens), wait_ms=200
                ) as lease:
                    print(
                        f"{request_id}: {lease.hit_tokens} of {len(tokens)} tokens are cached, {lease}"
                    )
                    assert worker.device is not None, (
                        "give the address of the local socket, unix:///…/kvlease.sock"
                    )
                    # Read again for each lease, because a daemon that has restarted may have new memory.
                    pool = worker.device.reshape(plan.num_blocks, plan.bytes_per_block)
                    first_block = plan.full_blocks(lease.hit_tokens)
                    pool[lease.block_ids[first_block:]] = 7  # stands for computing K and V
                    lease.commit(len(tokens), keys)
            print(f"on the device: {worker.lookup(keys).num_device_blocks} blocks of the prompt")


if __name__ == "__main__":
    main()
