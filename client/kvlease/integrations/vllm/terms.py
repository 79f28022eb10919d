"""Own what a process of an engine attaches by; how it does is `attachment.py`'s."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlease.errors import NeverFitsError
from kvlease.integrations.vllm.namespace import Identity
from kvlease.plan import CachePlan, PlanInputs


def _agrees(_: CachePlan) -> Sequence[str]:
    return ()


def _as_said(error: NeverFitsError) -> str:
    return error.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a process of an engine attaches by; the same after every loss."""

    identity: Identity
    inputs: PlanInputs | None
    """What the cache is registered with; None where another process does so, and this one waits for it."""
    cache: str
    """The cache's name, such as `Identity.cache_name` makes it; the setting `cache` goes before it."""
    rank: int = 0
    """The rank whose memory this process maps; the scheduler's process takes 0."""
    magazine: str = ""
    """The engine's magazine, by `magazine_name`; empty for a process that has none."""
    key_counts: bool = False
    """Whether this process is to know without a call what is surely not cached."""
    touches: bool = False
    """Whether this process touches the rank's memory, so that its pages are mapped ahead, in the background."""
    disagreements: Callable[[CachePlan], Sequence[str]] = _agrees
    """Compares the daemon's plan with vLLM's own, and names every number in which they differ."""
    no_room: Callable[[NeverFitsError], str] = _as_said
    """Says that the daemon has no memory for the cache, by the names of the settings that decide how much it takes."""
    had: CachePlan | None = None
    """The plan of the cache that other processes of the engine have attached to; None where that does not matter."""
    takes_other_capacity: bool = False
    """Whether a cache of the same identity but other sizes will do, where `disagreements` has nothing against it."""
    ends_with_start: bool = False
    """Whether the session is closed where the start has waited in vain: by then the engine has memory of its own."""
