"""A worker process of a soak: it makes random requests of all kinds, and compares every byte it is served."""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlease import Client, KVLeaseError, Lease, UnavailableError, Worker
from kvlease.ids import BYTES_PER_KEY
from tests.acceptance.serving import pool_of
from tests.acceptance.soaking import (
    CACHE,
    DEADLINE_SECONDS,
    TOKENS_PER_BLOCK,
    Board,
    image_of,
    key_in,
    next_turn,
    tail_key,
)

R = TypeVar("R")

HELD_MAX: Final = 2
"""Most requests that one worker has at once."""
ABANDONED_MAX: Final = 2
_IMPATIENT_SECONDS: Final = 0.002
_ABSENT_SECONDS: Final = 0.05
"""Seconds between two tries while there is no daemon."""


class Request:
    """A request under way: its tokens, its lease, and what lies in its blocks."""

    def __init__(self, worker: Worker, lease: Lease, tokens: NDArray[np.int32], done: int) -> None:
        self.worker = worker
        self.lease = lease
        self.tokens = tokens
        self.done = done
        self.tail = lease.request_id
        self.keys = worker.keys.chain(tokens, TOKENS_PER_BLOCK)

    def grow(self, tokens: NDArray[np.int32]) -> None:
        """Append tokens, which `advance` then computes."""
        self.tokens = np.concatenate([self.tokens[: self.done], tokens])
        self.keys = self.worker.keys.chain(self.tokens, TOKENS_PER_BLOCK)

    def write(self, end: int) -> None:
        """Write the blocks up to a token."""
        self.tail = f"{self.lease.request_id} {end}"
        for group in range(len(self.worker._session.groups)):
            for place, block in self._blocks(group, end):
                if place >= self.done // TOKENS_PER_BLOCK:
                    pool_of(self.worker)[block] = self._wanted(group, place, end)
        self.done = end

    def wrong(self) -> list[str]:
        """Describe every found or computed block that has wrong content."""
        found = []
        pool = pool_of(self.worker)
        for group in range(len(self.worker._session.groups)):
            for place, block in self._blocks(group, self.done):
                image = pool[block].copy()
                if not (image == self._wanted(group, place, self.done)).all():
                    found.append(
                        f"group {group} place {place} block {block}: {key_in(image, group)}"
                    )
        return found

    @property
    def num_blocks(self) -> int:
        """Count the blocks that can be compared."""
        return sum(
            len(self._blocks(group, self.done)) for group in range(len(self.worker._session.groups))
        )

    def _blocks(self, group: int, end: int) -> list[tuple[int, int]]:
        """Return place and block of a group up to a token, without the places that need no block."""
        has_null = len(self.worker._session.groups) > 1
        table = self.lease.blocks(group)[: -(-end // TOKENS_PER_BLOCK)].tolist()
        return [(place, block) for place, block in enumerate(table) if block or not has_null]

    def _wanted(self, group: int, place: int, end: int) -> NDArray[np.uint8]:
        is_whole = place < end // TOKENS_PER_BLOCK
        at = place * BYTES_PER_KEY
        key = self.keys[at : at + BYTES_PER_KEY] if is_whole else tail_key(f"{self.tail} {place}")
        return image_of(key, group, self.worker.plan.bytes_per_block)


class Soaker:
    """Choose what to do next, do it, and count it."""

    def __init__(self, worker: Worker, number: int, board: Board, folder: Path) -> None:
        self.worker = worker
        self.number = number
        self.board = board
        self.rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
        self.held: list[Request] = []
        self.evicted: list[Request] = []
        self.abandoned: list[Lease] = []
        self._folder = folder
        self._names = 0

    def act(self) -> None:
        """Do one thing at random; give up whatever the daemon refuses."""
        acts: list[tuple[int, Callable[[], None]]] = [
            (30, self.begin),
            (20, self.finish),
            (12, self.grow),
            (10, self.evict),
            (10, self.reload),
            (6, self.fork),
            (10, self.look),
            (4, self.displace),
            (3, self.abandon),
            (3, self.lose_answer),
        ]
        weights = np.array([weight for weight, _ in acts], float)
        _, act = acts[int(self.rng.choice(len(acts), p=weights / weights.sum()))]
        try:
            act()
        except KVLeaseError as error:
            self.board.add(self.number, error.code)
            if isinstance(error, UnavailableError):
                time.sleep(_ABSENT_SECONDS)
        for requests in (self.held, self.evicted):
            ended = [one for one in requests if not one.lease.is_live]
            self.board.add(self.number, "ended_leases", len(ended))
            for one in ended:
                told = f"{one.lease!r} evicted: {one.lease.is_evicted}, {one.lease.refusal}"
                self._tell("ended", told)
            requests[:] = [one for one in requests if one.lease.is_live]

    def end(self) -> None:
        """Give everything back."""
        leases = [one.lease for one in (*self.held, *self.evicted)]
        for lease in (*leases, *self.abandoned):
            with suppress(KVLeaseError):
                self.call(lease.release)

    def call(self, call: Callable[[], R], wait_ms: int = 0) -> R:
        """Make a call, and note on the board by when it must have ended."""
        seconds = self.worker._session.link.deadline_seconds + wait_ms / 1000
        due_at = time.monotonic_ns() + int(seconds * 1e9)
        self.board.set(self.number, "answer_due_at", due_at)
        try:
            return call()
        finally:
            self.board.set(self.number, "answer_due_at", 0)
            self.board.add(self.number, "calls")

    # What a request does

    def begin(self) -> None:
        """Reserve a prompt, compare its hits, and compute the rest."""
        if len(self.held) >= HELD_MAX:
            self.finish()
            return
        tokens = next_turn(self.rng)
        lease = self._reserve(tokens)
        request = Request(self.worker, lease, tokens, lease.hit_tokens)
        self.held.append(request)
        self.board.add(self.number, "requests")
        tiers = ("device", "host", "disk", "remote")
        for tier in tiers:
            self.board.add(self.number, f"{tier}_hits", getattr(lease, f"{tier}_hit_tokens") // 16)
        self.compare(request, f"reserve {[getattr(lease, f'{tier}_hit_tokens') for tier in tiers]}")
        self._advance(request)

    def finish(self) -> None:
        """Compare all of a request and release it."""
        if self.held:
            request = self.held.pop(int(self.rng.integers(len(self.held))))
            self.compare(request, "finish")
            self.call(request.lease.release)

    def grow(self) -> None:
        """Let a request generate some tokens."""
        if request := self._any():
            request.grow(self.rng.integers(0, 50_000, int(self.rng.integers(1, 40)), np.int32))
            self._advance(request)
            self.board.add(self.number, "grown")

    def evict(self) -> None:
        """Preempt a request."""
        if request := self._any():
            self.held.remove(request)
            self.evicted.append(request)
            self.compare(request, "before evict")
            try:
                self.call(lambda: request.lease.evict(wait_ms=500), 500)
            finally:
                if request.lease.is_live and not request.lease.is_evicted:
                    self.evicted.remove(request)
                    self.held.append(request)
            self.board.add(self.number, "evictions")

    def reload(self) -> None:
        """Bring a preempted request back, and compare every byte."""
        if self.evicted:
            request = self.evicted.pop(int(self.rng.integers(len(self.evicted))))
            try:
                self.call(lambda: request.lease.reload(wait_ms=500), 500)
            finally:
                kept = self.evicted if request.lease.is_evicted else self.held
                kept.append(request)
            self.compare(request, "reload")
            self.board.add(self.number, "reloads")

    def fork(self) -> None:
        """Let a second request go on from where a first one is."""
        request = self._any()
        if request is None or len(self.held) >= HELD_MAX:
            return
        wait_ms = self._wait_ms()
        name, num_tokens = self._name(), request.done + TOKENS_PER_BLOCK
        lease = self.call(lambda: request.lease.fork(name, num_tokens, wait_ms=wait_ms), wait_ms)
        child = Request(self.worker, lease, request.tokens[: request.done], request.done)
        child.tail = request.tail
        self.held.append(child)
        self.board.add(self.number, "forks")
        self.compare(child, "fork")
        child.grow(self.rng.integers(0, 50_000, TOKENS_PER_BLOCK, np.int32))
        self._advance(child)

    def look(self) -> None:
        """Compare all blocks of a running request."""
        if request := self._any():
            self.compare(request, "look")

    def displace(self) -> None:
        """Evict the coldest blocks from the device."""
        num_blocks = int(self.rng.integers(1, 16))
        self.call(lambda: self.worker.evict(num_blocks=num_blocks, wait_ms=200), 200)

    def abandon(self) -> None:
        """Forget a request for a while."""
        if request := self._any():
            self.held.remove(request)
            self.abandoned.append(request.lease)
            self.board.add(self.number, "abandoned")
        while len(self.abandoned) > ABANDONED_MAX:
            self.call(self.abandoned.pop(0).release)

    def lose_answer(self) -> None:
        """Ask for a prompt and hang up before the answer can have come."""
        link = self.worker._session.link
        link.deadline_seconds = _IMPATIENT_SECONDS
        self.board.add(self.number, "lost_answers")
        try:
            self.abandoned.append(self._reserve(next_turn(self.rng), wait_ms=0))
        finally:
            link.deadline_seconds = DEADLINE_SECONDS

    def compare(self, request: Request, when: str) -> None:
        """Compare every byte of a request, and write what is wrong to a file."""
        if not request.lease.is_live or request.lease.is_evicted:
            return
        self.board.add(self.number, "verified_blocks", request.num_blocks)
        if not (wrong := request.wrong()):
            return
        told = {"when": when, "lease": repr(request.lease), "done": request.done, "wrong": wrong}
        try:
            self.worker.heartbeat()
            told["after a heartbeat"] = repr(request.lease)
        except KVLeaseError as error:
            told["after a heartbeat"] = repr(error)
        told["worker"] = repr(self.worker)
        told["keys"] = [request.keys[at : at + 32].hex() for at in range(0, len(request.keys), 32)]
        self._tell("wrong", json.dumps(told))
        self.board.add(self.number, "wrong_blocks", len(wrong))

    def _tell(self, name: str, line: str) -> None:
        with (self._folder / f"{name}-{self.number}").open("a") as file:
            file.write(line + "\n")

    def _advance(self, request: Request) -> None:
        lease, total = request.lease, len(request.tokens)
        while request.done < total:
            wait_ms = self._wait_ms()
            self.call(lambda wait_ms=wait_ms: lease.extend(total, wait_ms=wait_ms), wait_ms)  # type: ignore[misc]
            end = min(total, lease.covered_tokens)
            if end <= request.done or not lease.is_live:
                return
            self.board.add(self.number, "computed", end - request.done)
            request.write(end)
            num_keys = end // TOKENS_PER_BLOCK
            self.call(lambda end=end, num=num_keys: lease.commit(end, request.keys[: num * 32]))  # type: ignore[misc]

    def _reserve(self, tokens: NDArray[np.int32], wait_ms: int = -1) -> Lease:
        wait_ms = self._wait_ms() if wait_ms < 0 else wait_ms
        num_keys = (len(tokens) - 1) // TOKENS_PER_BLOCK
        keys = self.worker.keys.chain(tokens[: num_keys * TOKENS_PER_BLOCK], TOKENS_PER_BLOCK)
        return self.call(
            lambda: self.worker.reserve(
                self._name(), keys=keys, num_tokens=len(tokens), wait_ms=wait_ms
            ),
            wait_ms,
        )

    def _any(self) -> Request | None:
        return self.held[int(self.rng.integers(len(self.held)))] if self.held else None

    def _wait_ms(self) -> int:
        return int(self.rng.choice([0, 20, 100, 500]))

    def _name(self) -> str:
        self._names += 1
        return f"request {os.getpid()} {self._names}"


def main(address: str, number: int, tenant: str, folder: Path) -> None:
    """Work until the stop file exists."""
    board = Board(folder / "board", number + 1)
    stop = folder / "stop"
    with Client(address, deadline_seconds=DEADLINE_SECONDS, on_doubt="raise") as client:
        while not stop.exists():
            try:
                worker = client.attach(CACHE, tenant=tenant, worker_name=f"soaker-{number}")
            except KVLeaseError as error:
                board.add(number, error.code)
                time.sleep(_ABSENT_SECONDS)
            else:
                break
        else:
            return
        with worker:
            soaker = Soaker(worker, number, board, folder)
            while not stop.exists():
                soaker.act()
            soaker.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
