"""Own one inference worker of a pod: it writes bytes derived from a prompt, and reports what it finds.

It runs in a container of its own with this file and the client. Orders come as JSON lines over a Unix socket in the
directory of its temporary files.
"""

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlease import Client, FullAttention, KVLeaseError, Lease, PlanInputs, Worker
from kvlease.errors import UnknownCacheError, UnknownLeaseError

CACHE = "of-the-pod"
TOKENS_PER_BLOCK = 16
NUM_BLOCKS = 64
LAYERS = tuple(
    FullAttention(name=f"layers.{index}", num_kv_heads=2, head_size=64, dtype="float16")
    for index in range(4)
)
INPUTS = PlanInputs(
    layers=LAYERS, tokens_per_block=TOKENS_PER_BLOCK, device_blocks=NUM_BLOCKS, host_bytes=16 << 20
)
SECONDS_MAX = 90.0
WAIT_MS = 30_000
"""Time to wait for blocks that come back from the host pool."""


class Engine:
    """An engine that computes nothing: its keys and values are functions of prompt and place."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._held: tuple[int, Lease, bytes] | None = None
        self._worker = self._attached()

    def who(self) -> dict[str, Any]:
        """Return this process's identity, the processes that it sees, and whether it can write files."""
        try:
            Path("/written").touch()
            refusal = ""
        except OSError as error:
            refusal = error.strerror
        return {
            "pid": os.getpid(),
            "uid": os.getuid(),
            "others": [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()],
            "refusal": refusal,
            "death_proof": self._worker.death_proof,
            "worker_id": self._worker.worker_id,
            "epoch": self._worker.epoch,
            "bytes_mapped": 0 if self._worker.device is None else self._worker.device.nbytes,
        }

    def serve(self, prompt: int, num_tokens: int) -> dict[str, Any]:
        """Reserve, map, compare the hits, write the rest, commit and release."""
        lease, keys, told = self._begun(prompt, num_tokens)
        with lease:
            lease.commit(num_tokens, keys)
        return told

    def hold(self, prompt: int, num_tokens: int, num_committed: int) -> dict[str, Any]:
        """Do the same as `serve`, but commit only a part and keep the lease."""
        lease, keys, told = self._begun(prompt, num_tokens)
        lease.commit(num_committed, keys[: num_committed // TOKENS_PER_BLOCK * 32])
        self._held = num_tokens, lease, keys
        return told

    def finish(self) -> dict[str, Any]:
        """Commit and release the held lease; report if it has ended."""
        assert self._held is not None, "nothing is held"
        num_tokens, lease, keys = self._held
        self._held = None
        try:
            lease.commit(num_tokens, keys)
            lease.release()
        except (UnknownCacheError, UnknownLeaseError) as error:
            return {"is_live": False, "code": error.code}
        return {"is_live": True, "epoch": self._worker.epoch}

    def evict(self) -> dict[str, Any]:
        """Have the daemon move all cached blocks to the host pool."""
        return {"num_evicted": self._worker.evict(num_blocks=NUM_BLOCKS).num_evicted}

    def _attached(self) -> Worker:
        end = time.monotonic() + SECONDS_MAX
        while True:
            try:
                if self._client.register(CACHE, INPUTS).status == "ready":
                    return self._client.attach(CACHE, worker_name="pod")
            except KVLeaseError as error:
                if not error.retryable or time.monotonic() > end:
                    raise
            time.sleep(0.05)

    def _begun(self, prompt: int, num_tokens: int) -> tuple[Lease, bytes, dict[str, Any]]:
        tokens = [prompt * 100_000 + index for index in range(num_tokens)]
        keys = self._worker.keys.chain(tokens, TOKENS_PER_BLOCK)
        request_id = f"{prompt}-{time.monotonic_ns()}"
        try:
            lease = self._worker.reserve(
                request_id, num_tokens=num_tokens, keys=keys, wait_ms=WAIT_MS
            )
        except UnknownCacheError:
            # The daemon came back without its memory: blocks and keys are gone, so register and attach anew.
            with contextlib.suppress(KVLeaseError):
                self._worker.close()
            self._worker = self._attached()
            return self._begun(prompt, num_tokens)
        return lease, keys, self._written(prompt, lease)

    def _written(self, prompt: int, lease: Lease) -> dict[str, Any]:
        lease.map()
        plan, region, tables = self._worker.plan, self._worker.device, self._worker.tables
        assert region is not None
        assert tables is not None
        pool = region.reshape(plan.num_blocks, plan.bytes_per_block)
        blocks = tables.block_ids(lease.row, lease.lease_id)
        num_found = lease.hit_tokens // TOKENS_PER_BLOCK
        wrong = 0
        for index, block in enumerate(blocks):
            wanted = _content(prompt, index, plan.bytes_per_block)
            if index < num_found:
                wrong += not np.array_equal(pool[block], wanted)
            else:
                pool[block] = wanted
        return {
            "num_blocks": len(blocks),
            "blocks": blocks.tolist(),
            "are_granted": blocks.tolist() == lease.block_ids.tolist(),
            "device_hit_tokens": lease.device_hit_tokens,
            "host_hit_tokens": lease.host_hit_tokens,
            "wrong_blocks": wrong,
            "epoch": self._worker.epoch,
        }


def main() -> None:
    """Attach, and carry out orders until the container ends."""
    place = Path(sys.argv[1])
    place.unlink(missing_ok=True)
    with (
        Client(on_doubt="raise", deadline_seconds=30) as client,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        engine = Engine(client)
        listener.bind(str(place))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as lines:
                for line in lines:
                    order = json.loads(line)
                    try:
                        told = getattr(engine, order.pop("do"))(**order)
                    except (KVLeaseError, AssertionError) as error:
                        told = {"error": repr(error)}
                    lines.write(json.dumps(told) + "\n")
                    lines.flush()


def _content(prompt: int, index: int, num_bytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng((prompt, index)).integers(0, 256, num_bytes, np.uint8)


if __name__ == "__main__":
    main()
