"""Own a load that shows well: two caches, three tenants, long conversations, refusals and a vanishing worker.

It runs until its standard input ends: `python -m tests.deploy.ui.load unix:///…/kvlease.sock http://127.0.0.1:… TOKEN`.
"""

import contextlib
import json
import random
import sys
import threading
import time
import urllib.request
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlease import (
    CacheOptions,
    Client,
    ExchangeOrder,
    FullAttention,
    KVLeaseError,
    Lease,
    PlanInputs,
    Worker,
)

TOKENS_PER_BLOCK = 16
BYTES_PER_BLOCK = TOKENS_PER_BLOCK * 2 * 2 * 16 * 4
CACHES = {
    "llama-8b": (2400, 1600, ("leaf-lru", "adaptive", "leaf-lru@4800")),
    "gemma-2b": (480, 320, ()),
}
"""Device blocks, host slots and ghosts of each cache."""
BLOCKS_LEFT = 400
"""Device blocks that a resize leaves gemma-2b."""
TENANTS = ("chat", "search", "batch")
PAUSE_SECONDS = 0.06


def main(address: str, http: str, token: str) -> None:
    """Run the load."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(address, on_doubt="raise"))
        for name, (blocks, slots, ghosts) in CACHES.items():
            client.register(name, inputs_of(name, blocks, slots), _options(ghosts))
            while client.get_cache(name).status != "ready":
                time.sleep(0.02)
        talks = [
            Talk(stack.enter_context(client.attach(cache, worker_name=tenant, tenant=tenant)), seed)
            for seed, (cache, tenant) in enumerate(
                [("llama-8b", tenant) for tenant in TENANTS] + [("gemma-2b", "chat")]
            )
        ]
        engine = stack.enter_context(
            client.attach("llama-8b", worker_name="engine", tenant="chat", magazine="engine")
        )
        engine.magazine().exchange(ExchangeOrder(take_running=48))
        _vanish(http, token)
        client.resize("gemma-2b", "device", BLOCKS_LEFT)
        sys.stdout.write("running\n")
        sys.stdout.flush()
        while not ended.is_set():
            for talk in talks:
                talk.go_on()
            ended.wait(PAUSE_SECONDS)
        for talk in talks:
            talk.end()


class Talk:
    """One worker and its conversations: each begins with one of a few prompts and grows turn by turn."""

    def __init__(self, worker: Worker, seed: int) -> None:
        self._worker = worker
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._live: deque[tuple[Lease, float]] = deque()
        self._grown: dict[int, int] = {}
        self._number = 0

    def go_on(self) -> None:
        """Begin a request, and end the oldest."""
        self._number += 1
        talk = min(int(self._random.expovariate(0.12)), 60)
        grown = self._grown.get(talk, 0) + self._random.randint(2, 7)
        self._grown[talk] = 0 if grown > 60 else grown
        tokens = _tokens(talk, 12 + grown)
        keys = self._worker.keys.chain(tokens, TOKENS_PER_BLOCK)
        name = f"{talk}-{self._number}"
        try:
            wait_ms = 0 if self._number % 11 == 0 else 20
            lease = self._worker.reserve(name, keys=keys, num_tokens=len(tokens), wait_ms=wait_ms)
            if self._number % 3:
                lease.commit(len(tokens), keys)
            self._live.append((lease, time.monotonic() + self._random.uniform(0.4, 4.0)))
            if self._number % 60 == 0:
                self._worker.reserve(f"{name}-huge", num_tokens=10**6)
        except KVLeaseError:
            self.end(1)
        while self._live and self._live[0][1] < time.monotonic():
            self._live.popleft()[0].release()

    def end(self, count: int = 10**6) -> None:
        """Release some requests, the oldest first."""
        while self._live and count:
            self._live.popleft()[0].release()
            count -= 1


def inputs_of(name: str, blocks: int, slots: int) -> PlanInputs:
    """Return a cache of small blocks."""
    return PlanInputs(
        layers=(FullAttention(name="layer", num_kv_heads=2, head_size=16, dtype="float32"),),
        tokens_per_block=TOKENS_PER_BLOCK,
        device_blocks=blocks,
        host_bytes=slots * BYTES_PER_BLOCK,
        model_digest=name,
    )


def _options(ghosts: tuple[str, ...]) -> CacheOptions:
    return CacheOptions(write_policy="after-n-hits", write_after_hits=1, ghosts=ghosts)


def _tokens(talk: int, num_blocks: int) -> NDArray[np.int32]:
    """Return a conversation, which shares its first blocks with others of the same system prompt."""
    tokens = np.arange(num_blocks * TOKENS_PER_BLOCK, dtype=np.int32) + talk * 1_000_003
    tokens[: 8 * TOKENS_PER_BLOCK] = np.arange(8 * TOKENS_PER_BLOCK) + talk % 5
    return tokens


def _vanish(http: str, token: str) -> None:
    """Have a worker take blocks and fall silent; they are quarantined, as its death cannot be proven."""
    attached = _post(f"{http}/v1/caches/llama-8b/workers", {"worker_name": "gone"}, token)
    body = {"request_id": "never-ended", "num_tokens": 40 * TOKENS_PER_BLOCK}
    _post(f"{http}/v1/leases", body, attached["token"])


def _post(url: str, body: object, token: str = "") -> Any:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - loopback
        return json.load(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
