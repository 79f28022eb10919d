"""Own the terms on which a process of an engine attaches; how it attaches is in `attachment.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlease.errors import NeverFitsError
from kvlease.integrations.vllm.identity.namespace import Identity
from kvlease.plan import CachePlan, PlanInputs


def _agrees(_: CachePlan) -> Sequence[str]:
    return ()


def _as_said(error: NeverFitsError) -> str:
    return error.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms on which a process of an engine attaches; they stay the same after every loss."""

    identity: Identity
    inputs: PlanInputs | None
    """The inputs to register the cache with; None if another process registers it, and this one waits for that."""
    cache: str
    """The cache's name, as made by `Identity.cache_name`; the setting `cache` takes precedence."""
    rank: int = 0
    """The rank whose memory this process maps; the scheduler's process takes 0."""
    magazine: str = ""
    """The name of the engine's magazine, as made by `magazine_name`; empty if the process has none."""
    key_counts: bool = False
    """Whether this process reads key counts, to know without a call what is surely not cached."""
    touches: bool = False
    """Whether this process touches the rank's memory, so that its pages are mapped ahead in the background."""
    disagreements: Callable[[CachePlan], Sequence[str]] = _agrees
    """Compares the daemon's plan with vLLM's own, and names every number in which they differ."""
    no_room: Callable[[NeverFitsError], str] = _as_said
    """Says that the daemon has no memory for the cache, naming the settings that decide how much it takes."""
    had: CachePlan | None = None
    """The plan of the cache that other processes of the engine have attached to; None if that does not matter."""
    takes_other_capacity: bool = False
    """Whether to accept a cache of the same identity but other sizes, if `disagreements` finds nothing against it."""
    ends_with_start: bool = False
    """Whether the session is closed if the start has waited in vain, as the engine then has memory of its own."""
