"""Own what a trace is: the requests that a cache was asked for, in columns, and what a policy would have found of them.

How a trace is written in a file is `trace_files`' business.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvlease.v1 import kvlease_pb2 as pb

TOKENS_PER_KEY: Final = 512
"""Tokens of one key of a trace that does not say it, as in the published ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests in the order of their times; the keys of request i are `key_ids[offsets[i]:offsets[i + 1]]`.

    A key names a whole prefix: where it is found, all before it was the same.
    """

    times_ms: NDArray[np.int64]
    """Since the trace's beginning."""
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    """One more than there are requests."""
    key_ids: NDArray[np.int64]
    """Numbers from 0 on, in the order in which keys come up first."""
    tokens_per_key: int = TOKENS_PER_KEY
    hit_tokens: NDArray[np.int64] | None = None
    """What the recording daemon found of each; None where nobody wrote it down."""

    def __repr__(self) -> str:
        """Show how large it is."""
        return (
            f"<Trace {len(self)} requests, {len(self.key_ids)} keys, {self.num_distinct} distinct>"
        )

    def __len__(self) -> int:
        """Count the requests."""
        return len(self.times_ms)

    @property
    def num_distinct(self) -> int:
        """Keys that differ."""
        return int(self.key_ids.max(initial=-1)) + 1

    @property
    def is_prefix_closed(self) -> bool:
        """Whether every key always follows the same one, as keys of whole prefixes do."""
        parents = np.empty(len(self.key_ids), np.int64)
        parents[1:] = self.key_ids[:-1]
        parents[self.offsets[:-1][np.diff(self.offsets) > 0]] = -1
        first: NDArray[np.int64] = np.empty(self.num_distinct, np.int64)
        first[self.key_ids[::-1]] = parents[::-1]
        return bool((first[self.key_ids] == parents).all())

    def keys_of(self, request: int) -> NDArray[np.int64]:
        """Return the keys of one request, the first of its prompt first."""
        keys: NDArray[np.int64] = self.key_ids[self.offsets[request] : self.offsets[request + 1]]
        return keys

    def first(self, num_requests: int) -> Self:
        """Return the first requests alone; all, where there are no more."""
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
    """From the trace's beginning to the grant."""
    input_tokens: int
    """Tokens of its prompt, as far as its keys tell."""
    output_tokens: int
    """Tokens that were computed behind them."""
    key_digests: bytes
    """Packed uint64, keyed with a secret of this trace that nobody is told."""
    tokens_per_key: int
    hit_tokens: int
    num_dropped: int
    """Requests left out before this one, because the reader was too slow."""

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
    """Return the trace of some recorded requests: by time, its digests as numbers from 0 on."""
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
    """Return names as numbers from 0 on, in the order in which they come up first."""
    _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    number: NDArray[np.int64] = np.empty(len(first), np.int64)
    number[first.argsort()] = np.arange(len(first))
    return number[inverse]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What one policy finds of a trace in a pool of one size that is empty at first."""

    policy: str
    num_blocks: int
    """Blocks of the pool, of one key each."""
    num_requests: int
    num_keys: int
    """Keys that were asked for."""
    num_hits: int
    """Those found, each behind nothing but others that were found."""
    num_hits_bound: int
    """Those that a pool of this size would find if it knew the future."""
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
