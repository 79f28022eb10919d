"""Own the answers of engines, their comparison, and the tally of all comparisons in a test run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

LOGPROB_ERROR_MAX: Final = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The output of one request."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """For each token, the log-probabilities of the likeliest ones."""
    num_cached_tokens: int
    finish_reason: str | None
    """length, stop, abort or error."""
    seconds_to_first_token: float

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> "Said":
        """Return what a life wrote."""
        logprobs = tuple({int(k): v for k, v in at.items()} for at in words["logprobs"])
        return cls(
            tokens=tuple(words["tokens"]),
            logprobs=logprobs,
            num_cached_tokens=words.get("num_cached_tokens") or 0,
            finish_reason=words["finish_reason"],
            seconds_to_first_token=words.get("seconds_to_first_token", float("nan")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The result of one order to generate."""

    requests: tuple[Said, ...]
    steps: int
    seconds: float
    spans: Mapping[str, Sequence[float]]
    """Seconds of every call of the scheduler, by the call's name; with `Job.times` only."""
    cpu_seconds: float = 0.0
    """Processor seconds of the life's process."""
    cpu_spans: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The same as `spans`, in processor seconds of the thread that called."""

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> "Round":
        """Return what a life wrote."""
        return cls(
            requests=tuple(map(Said.of, words["requests"])),
            steps=words["steps"],
            seconds=words["seconds"],
            spans=words["spans"],
            cpu_seconds=words.get("cpu_seconds", 0.0),
            cpu_spans=words.get("cpu_spans", {}),
        )

    @property
    def cached(self) -> list[int]:
        """Return how many tokens of each request were found."""
        return [said.num_cached_tokens for said in self.requests]


@dataclass(slots=True)
class Tally:
    """Counts of requests that were compared with the same requests without a cache."""

    requests: int = 0
    differing: int = 0
    aborted: int = 0
    """Aborted requests, whose output before the abort is compared."""
    failed: int = 0
    """Requests that ended in a wrong way."""
    cached_tokens: int = 0
    """Prompt tokens that were found instead of computed."""

    def add(self, other: Mapping[str, int]) -> None:
        """Add what another process has counted."""
        for name, count in other.items():
            setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the tally in one line."""
        return (
            f"{self.requests} requests compared with the same without a cache: {self.differing} differ, "
            f"{self.failed} failed, {self.aborted} were aborted; {self.cached_tokens} prompt tokens were found"
        )


TALLY: Final = Tally()
"""The comparisons of this process."""


def differences(got: Round, wanted: Round) -> list[str]:
    """Return a sentence for each request whose output differs, and count all requests in the tally.

    An output differs by its tokens or by its log-probabilities.
    """
    found = contrasts(got, wanted)
    reasons = [said.finish_reason for said in got.requests]
    TALLY.add(
        {
            "requests": len(reasons),
            "differing": len(found),
            "aborted": reasons.count("abort"),
            "failed": sum(one not in _ENDS for one in reasons),
            "cached_tokens": sum(got.cached),
        }
    )
    return found


_ENDS: Final = ("length", "stop", "abort")


def contrasts(got: Round, wanted: Round) -> list[str]:
    """Return the same as `differences` without counting, for proofs that a difference would be seen."""
    found = []
    for index, (ours, theirs) in enumerate(zip(got.requests, wanted.requests, strict=True)):
        if ours.finish_reason == "abort":
            # The output before the abort must be right as far as it goes.
            theirs_cut = theirs.tokens[: len(ours.tokens)]
            if ours.tokens != theirs_cut:
                found.append(f"request {index}: {ours.tokens} instead of {theirs_cut}")
        elif ours.tokens != theirs.tokens:
            found.append(f"request {index}: {ours.tokens} instead of {theirs.tokens}")
        elif (error := _logprob_error(ours, theirs)) > LOGPROB_ERROR_MAX:
            found.append(f"request {index}: log-probabilities differ by {error:.2e}")
    return found


def _logprob_error(ours: Said, theirs: Said) -> float:
    """Return the largest difference over the tokens that both name; the least likely of them may differ."""
    assert len(ours.logprobs) == len(theirs.logprobs)
    return max(
        (
            abs(here[token] - there[token])
            for here, there in zip(ours.logprobs, theirs.logprobs, strict=True)
            for token in here.keys() & there.keys()
        ),
        default=0.0,
    )
