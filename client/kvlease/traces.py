"""Own what a trace is: the requests that a cache got, in columns, and how much of them a policy would have found.

How a file holds a trace is `trace_files`' business.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvlease.v1 import kvlease_pb2 as pb

TOKENS_PER_KEY: Final = 512
"""Tokens of one key in a trace that does not say it, as in published traces."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests in the order of their times; the keys of request i are `key_ids[offsets[i]:offsets[i + 1]]`.

    A key names a whole prefix: requests that share a key share all tokens before it, too.
    """

    times_ms: NDArray[np.int64]
    """Milliseconds since the trace's beginning."""
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    """Where each request's keys begin in `key_ids`, and at last where they all end: one entry more than requests."""
    key_ids: NDArray[np.int64]
    """Keys as numbers from 0 on, in the order in which they first occur."""
    tokens_per_key: int = TOKENS_PER_KEY
    hit_tokens: NDArray[np.int64] | None = None
    """Tokens of each request that the recording daemon found; None if they were not recorded."""

    def __repr__(self) -> str:
        """Show how large the trace is."""
        return (
            f"<Trace {len(self)} requests, {len(self.key_ids)} keys, {self.num_distinct} distinct>"
        )

    def __len__(self) -> int:
        """Count the requests."""
        return len(self.times_ms)

    @property
    def num_distinct(self) -> int:
        """How many different keys there are."""
        return int(self.key_ids.max(initial=-1)) + 1

    @property
    def is_prefix_closed(self) -> bool:
        """Whether every key always follows the same key, as keys of whole prefixes do."""
        parents = np.empty(len(self.key_ids), np.int64)
        parents[1:] = self.key_ids[:-1]
        parents[self.offsets[:-1][np.diff(self.offsets) > 0]] = -1
        first: NDArray[np.int64] = np.empty(self.num_distinct, np.int64)
        first[self.key_ids[::-1]] = parents[::-1]
        return bool((first[self.key_ids] == parents).all())

    def keys_of(self, request: int) -> NDArray[np.int64]:
        """Return the keys of one request, in the order of its prompt."""
        keys: NDArray[np.int64] = self.key_ids[self.offsets[request] : self.offsets[request + 1]]
        return keys

    def first(self, num_requests: int) -> Self:
        """Return a trace of only the first `num_requests` requests, or of all if there are no more."""
        if num_requests >= len(self):
            return self
        return replace(
            self,
            times_ms=self.times_ms[:num_requests],
            input_tokens=self.input_tokens[:num_requests],
            output_tokens=self.output_tokens[:num_requests],
            offsets=self.offsets[: num_requests + 1],
            key_ids=self.key_ids[: self.offsets[num_requests]],
            hit_tokens=None if self.hit_tokens is None else self.hit_tokens[:num_requests],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request of a running cache whose lease has ended."""

    timestamp_ms: int
    """Milliseconds from the trace's beginning to the grant."""
    input_tokens: int
    """Tokens of its prompt, as far as its keys tell."""
    output_tokens: int
    """Tokens that were computed behind the prompt."""
    key_digests: bytes
    """Packed uint64 digests of its keys, made with a secret of this trace that nobody is told."""
    tokens_per_key: int
    hit_tokens: int
    num_dropped: int
    """Requests left out before this one, because the reader was too slow; without keys, this only tells of these."""

    @classmethod
    def from_proto(cls, message: pb.TraceResponse) -> Self:
        """Return what the message says."""
        return cls(
            timestamp_ms=message.timestamp_ms,
            input_tokens=message.input_tokens,
            output_tokens=message.output_tokens,
            key_digests=message.key_digests,
            tokens_per_key=message.tokens_per_key,
            hit_tokens=message.hit_tokens,
            num_dropped=message.num_dropped,
        )


def gathered(requests: list[TracedRequest]) -> Trace:
    """Return the trace of recorded requests, ordered by time, with digests turned into numbers from 0 on."""
    requests = sorted(requests, key=lambda one: one.timestamp_ms)
    digests = np.frombuffer(b"".join(one.key_digests for one in requests), "<u8")
    num_keys = [len(one.key_digests) // digests.itemsize for one in requests]
    return Trace(
        times_ms=np.array([one.timestamp_ms for one in requests], np.int64),
        input_tokens=np.array([one.input_tokens for one in requests], np.int64),
        output_tokens=np.array([one.output_tokens for one in requests], np.int64),
        offsets=np.concatenate([[0], np.cumsum(num_keys, dtype=np.int64)]),
        key_ids=dense(digests),
        tokens_per_key=requests[0].tokens_per_key if requests else TOKENS_PER_KEY,
        hit_tokens=np.array([one.hit_tokens for one in requests], np.int64),
    )


def dense(names: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return names as numbers from 0 on, in the order in which the names first occur."""
    _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    number: NDArray[np.int64] = np.empty(len(first), np.int64)
    number[first.argsort()] = np.arange(len(first))
    return number[inverse]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """How much of a trace one policy finds in a pool of one size that is empty at first."""

    policy: str
    num_blocks: int
    """Blocks of the pool; each holds one key."""
    num_requests: int
    num_keys: int
    """Keys that were asked for."""
    num_hits: int
    """Keys that were found, with all keys before them in their request."""
    num_hits_bound: int
    """Keys that a pool of this size would find if it knew the future."""
    seconds: float
    """How long the simulation took."""

    @property
    def hit_ratio(self) -> float:
        """The share of the keys that was found."""
        return self.num_hits / self.num_keys if self.num_keys else 0.0

    @property
    def bound_hit_ratio(self) -> float:
        """The share of the keys that could have been found."""
        return self.num_hits_bound / self.num_keys if self.num_keys else 0.0
