"""Run a request through a cache with full attention and a sliding window, and fork it; print all block tables.

Start a daemon with `make serve`, then run `.venv/bin/python examples/hybrid.py`.
"""

from kvlease import Client, EngineInputs, FullAttention, Lease, PlanInputs, SlidingWindow

GROUPS = ("full", "window")
FULL = FullAttention(name="full", num_kv_heads=2, head_size=64, dtype="float16")
WINDOW = SlidingWindow(
    name="window", num_kv_heads=2, head_size=64, dtype="float16", window_tokens=32
)
INPUTS = PlanInputs(
    layers=(FULL, WINDOW),
    tokens_per_block=16,
    device_blocks=64,
    null_blocks=1,  # places that the window has left behind read as block 0
    longest_request_tokens=512,
    engine=EngineInputs(tokens_per_step=32),
)


def show(what: str, lease: Lease) -> None:
    """Print a lease's table of each group."""
    rows = [f"{name} {lease.blocks(group).tolist()}" for group, name in enumerate(GROUPS)]
    print(f"{what:21} room for {lease.covered_tokens:3} tokens", *rows, sep="  ")


def main() -> None:
    """Compute a prompt in pieces, then let a second request go on from it."""
    tokens = list(range(120))
    with Client(on_doubt="raise") as client:
        client.register("hybrid", INPUTS)
        with client.attach("hybrid") as worker:
            keys = worker.keys.chain(tokens, worker.plan.hash_block_tokens)
            with worker.reserve("first", keys=keys, num_tokens=len(tokens)) as lease:
                show(f"{lease.hit_tokens} found", lease)
                done = lease.hit_tokens
                while done < len(tokens):
                    lease.extend(len(tokens))  # covers as much as the window has room for
                    done = min(len(tokens), lease.covered_tokens)  # stands for computing K and V
                    computed = worker.keys.chain(tokens[:done], worker.plan.hash_block_tokens)
                    left = lease.commit(done, computed).num_given_back
                    show(f"{done} computed, {left} back", lease)
                with lease.fork("second", num_tokens=140) as child:
                    show("forked", child)
            print(f"{worker.lookup(keys).hit_tokens} tokens can be found by others")


if __name__ == "__main__":
    main()
