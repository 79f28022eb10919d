"""A cache of full attention beside a sliding window in a long generation: its blocks, its bytes, and a kill."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlease import (
    Client,
    EngineInputs,
    FullAttention,
    Lease,
    ParallelInputs,
    PlanInputs,
    SlidingWindow,
    StateSpace,
    Worker,
)
from tests.acceptance.serving import ROOT, Serving, blocks_in_use, new_cache, pool_of

pytestmark = pytest.mark.acceptance

WINDOW_TOKENS = 64
INPUTS = PlanInputs(
    layers=(
        FullAttention(name="full", num_kv_heads=1, head_size=16, dtype="float32"),
        SlidingWindow(
            name="window",
            num_kv_heads=1,
            head_size=16,
            dtype="float32",
            window_tokens=WINDOW_TOKENS,
        ),
    ),
    tokens_per_block=16,
    device_blocks=96,
    null_blocks=1,
    host_bytes=1 << 20,
    longest_request_tokens=1024,
    engine=EngineInputs(tokens_per_step=16),
)
STATES = PlanInputs(
    layers=(
        FullAttention(name="full", num_kv_heads=2, head_size=64, dtype="float16"),
        StateSpace(name="state", shapes=((16, 64),), dtypes=("float32",)),
    ),
    tokens_per_block=16,
    device_blocks=32,
    null_blocks=1,
    longest_request_tokens=320,
    engine=EngineInputs(tokens_per_step=32, state_mode="align"),
)
NUM_PROMPT, NUM_TOKENS = 40, 640
KILLED_AT = 317
"""A token in the middle of a block and of the generation."""
MOST_WINDOW_BLOCKS = WINDOW_TOKENS // 16 + 1


@pytest.fixture
def client(daemon: Serving) -> Iterator[Client]:
    """Register a new cache, and give its client."""
    with new_cache(daemon, "windows", INPUTS) as client:
        yield client


class Request:
    """A request that writes bytes of its own for every token, and reads what attention would read."""

    def __init__(self, worker: Worker, request_id: str, tokens: list[int]) -> None:
        self.worker = worker
        self.tokens = tokens
        num_keys = (len(tokens) - 1) // 16
        keys = worker.keys.chain(tokens[: num_keys * 16], 16)
        self.lease: Lease = worker.reserve(
            request_id, keys=keys, num_tokens=len(tokens), wait_ms=20_000
        )
        self.done = self.lease.hit_tokens

    def advance(self) -> None:
        """Compute up to the last token, in as many pieces as the windows require."""
        while self.done < len(self.tokens):
            self.lease.extend(len(self.tokens))
            end = min(len(self.tokens), self.lease.covered_tokens)
            for token in range(self.done, end):
                self._write(token)
            self.lease.commit(end, self.worker.keys.chain(self.tokens[:end], 16))
            self.done = end

    def missing(self) -> list[tuple[int, int]]:
        """Return group and token of everything that attention would read and that has other bytes than were written."""
        starts = (0, max(0, self.done - WINDOW_TOKENS + 1))
        return [
            (group, token)
            for group, start in enumerate(starts)
            for token in range(start, self.done)
            if not (self._place(group, token) == self._bytes(group, token)).all()
        ]

    def _write(self, token: int) -> None:
        for group in range(2):
            self._place(group, token)[:] = self._bytes(group, token)

    def _bytes(self, group: int, token: int) -> int:
        return (self.tokens[token] * 2 + group) % 251 + 1

    def _place(self, group: int, token: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return the bytes of a token in a group, as if states simply followed each other."""
        block = int(self.lease.blocks(group)[token // 16])
        assert block, "a token that is read has a block"
        width = self.worker.plan.bytes_per_block // 16
        return pool_of(self.worker)[block, token % 16 * width : (token % 16 + 1) * width]


def window_blocks(client: Client, request: Request) -> int:
    """Return how many blocks of the pool are in use beyond those of full attention."""
    num_full = int(np.count_nonzero(request.lease.blocks(0)))
    return blocks_in_use(client, "windows") - num_full


def test_long_generation_takes_constant_blocks_for_its_window(
    daemon: Serving, client: Client
) -> None:
    """The pool's figures stay constant, and a killed control process costs neither the lease nor a byte."""
    with client.attach("windows") as worker:
        request = Request(worker, "long", list(range(NUM_PROMPT)))
        lease_id, used = request.lease.lease_id, []
        for token in range(NUM_PROMPT, NUM_TOKENS):
            if token == KILLED_AT:
                before = [request.lease.blocks(group).tolist() for group in range(2)]
                daemon.restart_control(worker)
                after = [request.lease.blocks(group).tolist() for group in range(2)]
            request.advance()
            request.tokens.append(token)
            if token % 8 == 0:
                used.append(window_blocks(client, request))
        request.advance()

        assert after == before
        assert (request.lease.is_live, request.lease.lease_id) == (True, lease_id)
        assert request.missing() == []
        assert set(used[-60:]) <= {MOST_WINDOW_BLOCKS - 1, MOST_WINDOW_BLOCKS}
        assert len(request.lease.blocks(0)) == NUM_TOKENS // 16


def test_second_request_reads_what_the_first_one_computed(daemon: Serving, client: Client) -> None:
    """A hit is as long as both groups have it: on the device, reloaded from the host pool, and after a restart."""
    tokens = list(range(1000, 1200))
    with client.attach("windows") as worker:
        first = Request(worker, "first", tokens)
        first.advance()
        first.lease.release()

        hits = []
        for number in range(3):
            if number == 1:
                client.evict(cache="windows", num_blocks=96)
            if number == 2:
                daemon.restart_control(worker)
            again = Request(worker, f"again {number}", tokens)
            hits.append((again.lease.device_hit_tokens, again.lease.host_hit_tokens))
            again.advance()
            assert again.missing() == []
            again.lease.release()

    assert [sum(hit) for hit in hits] == [192, 192, 192]
    assert hits[0] == hits[2] == (192, 0)
    assert hits[1][1] > 0


def test_fork_of_a_window_goes_on_by_itself(client: Client) -> None:
    """The child has the parent's window; both read the same bytes before the fork and their own behind it."""
    with client.attach("windows") as worker:
        parent = Request(worker, "parent", list(range(200)))
        parent.advance()
        child = Request.__new__(Request)
        child.worker, child.tokens, child.done = worker, list(range(200)), 200
        child.lease = parent.lease.fork("child", 216)
        assert child.missing() == []

        child.tokens += range(500, 516)
        parent.tokens += range(200, 216)
        child.advance()
        parent.advance()

        assert child.missing() == parent.missing() == []


def test_preempted_window_comes_back(daemon: Serving, client: Client) -> None:
    """After an eviction, overwritten blocks and a killed daemon, a reload brings both groups' bytes back."""
    with client.attach("windows") as worker:
        request = Request(worker, "victim", list(range(300)))
        request.advance()
        request.lease.evict()
        pool_of(worker)[1:] = 0xEE
        daemon.restart_control(worker)

        reloaded = request.lease.reload()

        assert reloaded.num_tokens >= 300 - 300 % 16
        assert request.missing() == []


@pytest.mark.parametrize(
    ("first_end", "hit_tokens"),
    [pytest.param(32, 32, id="up to a block's end"), pytest.param(40, 0, id="all at once")],
)
def test_state_is_found_where_a_lease_was_made_to_end(
    daemon: Serving, first_end: int, hit_tokens: int
) -> None:
    """A recurrent state has a block only where an extend ended; another request finds its bytes there."""
    tokens = list(range(40))
    with Client(daemon.address("unix"), on_doubt="raise") as client:
        client.register("states", STATES)
        daemon.until(lambda: client.get_cache("states").status == "ready")
        with client.attach("states") as worker:
            keys = worker.keys.chain(tokens, 16)
            with worker.reserve("first", num_tokens=first_end) as lease:
                pool_of(worker)[lease.blocks(1)[-1]] = 7
                lease.commit(32, keys)
                lease.extend(40)
                lease.commit(40, b"")
            second = worker.reserve("second", keys=keys, num_tokens=40)

            assert second.hit_tokens == hit_tokens
            found = pool_of(worker)[second.blocks(1)[1]] if hit_tokens else np.array(7)
            assert (found == 7).all()
        client.delete_cache("states")


@pytest.mark.parametrize("transport", ["http+unix", "grpc+unix"])
def test_rank_without_a_table_follows_one_that_jumped_far(daemon: Serving, transport: str) -> None:
    """A rank without a table is told the places of its states, and keeps its lease while it catches up."""
    inputs = replace(STATES, layout="LBHNC", parallel=ParallelInputs(tensor_ranks=2))
    with new_cache(daemon, "far", inputs) as client:
        far = Client(daemon.address(transport), on_doubt="raise")
        with (
            far,
            client.attach("far", engine="e", rank=0) as left,
            far.attach("far", engine="e", rank=1) as right,
        ):
            jumping, following = (one.reserve("r", num_tokens=16) for one in (left, right))
            jumping.extend(160)

            for num_tokens in (48, 80, 160, 192):
                assert following.extend(num_tokens)

            jumping.extend(192)
            assert following.block_ids.tolist() == jumping.block_ids.tolist()


def test_rank_that_joins_an_evicted_lease_covers_nothing_until_it_is_reloaded(
    daemon: Serving,
) -> None:
    """After the reload it covers as many tokens as the other rank does."""
    inputs = replace(INPUTS, layout="LBHNC", parallel=ParallelInputs(tensor_ranks=2))
    with (
        new_cache(daemon, "late", inputs) as client,
        client.attach("late", engine="e", rank=0) as first,
    ):
        lease = first.reserve("r", num_tokens=40)
        covered_tokens = lease.covered_tokens
        with client.attach("late", engine="e", rank=1) as second, ThreadPoolExecutor() as threads:
            list(threads.map(Lease.evict, (lease, second.reserve("r", num_tokens=40))))
        with (
            client.attach("late", engine="e", rank=1) as third,
            ThreadPoolExecutor() as threads,
        ):
            joined = third.reserve("r", num_tokens=40)
            assert (joined.is_evicted, joined.covered_tokens) == (True, 0)

            list(threads.map(Lease.reload, (lease, joined)))

            assert joined.covered_tokens == lease.covered_tokens == covered_tokens > 0


def test_example_of_a_hybrid_cache_runs(daemon: Serving) -> None:
    """The example runs: its window moves on, and its fork shares the rest."""
    run = subprocess.run(
        [sys.executable, str(Path(ROOT) / "examples" / "hybrid.py")],
        env=os.environ | {"KVLEASE_ADDRESS": daemon.address("unix")},
        capture_output=True,
        text=True,
        check=True,
    )

    lines = run.stdout.splitlines()
    assert "window [0, 0, 0, 0, 0, 14, 15, 16]" in lines[2]
    assert "112 tokens can be found by others" in lines[-1]


def test_code_of_the_concepts_page_runs(client: Client) -> None:
    """The page's loop computes a prompt to its end as the windows move on."""
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    loop = page.split("```python\n")[1].split("```")[0]
    computed: list[int] = []
    with client.attach("windows") as worker, worker.reserve("r", num_tokens=200) as lease:
        names: dict[str, Any] = {
            "lease": lease,
            "worker": worker,
            "plan": worker.plan,
            "tokens": list(range(200)),
            "done": lease.hit_tokens,
            "prefill": lambda tokens, _: computed.extend(tokens),
        }
        exec(loop, names)  # noqa: S102 - the page's own code

        assert computed == list(range(200))
