"""Own which requests vLLM's offloading scheduler was not told of yet, as nothing can be loaded for them.

What it keeps of a request is for its loads, and for its stores, which are planned behind its first step. One that has
nothing to load is told of in its second step, or when it ends; so nobody waits for that before a first token.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple


class Started(NamedTuple):
    """A request that has run its first step."""

    request: Any
    block_ids: tuple[list[int], ...]
    """The engine's blocks that it got for that, by group."""
    is_absent: bool
    """Whether it was asked for, and surely nothing of it was cached."""


class Newcomers:
    """The requests that wait, and those that ran their first step."""

    def __init__(self) -> None:
        """Begin with none."""
        self.waiting: dict[str, Any] = {}
        self._absent: set[str] = set()
        self._started: dict[str, Started] = {}

    def __repr__(self) -> str:
        """Show life: how many requests wait, and how many have started."""
        return f"<Newcomers {len(self.waiting)} wait, {len(self._started)} started>"

    def is_started(self, request_id: str) -> bool:
        """Tell whether a request has run its first step."""
        return request_id in self._started

    def note_absent(self, request_id: str) -> None:
        """Note that surely nothing of a request that waits is cached."""
        self._absent.add(request_id)

    def first(self, most: int) -> list[Any]:
        """Return up to so many requests that wait, in the order in which they came."""
        return list(islice(self.waiting.values(), most))

    def leave(self, request_id: str) -> None:
        """Let go of a request that waits."""
        self.waiting.pop(request_id, None)
        self._absent.discard(request_id)

    def start(self, scheduled: Iterable[Any]) -> list[Started]:
        """Note which requests run their first step, as vLLM describes them; returns those that were waiting here."""
        started = []
        for one in scheduled:
            request = self.waiting.pop(one.req_id, None)
            if request is None:
                continue
            is_absent = one.req_id in self._absent
            self._absent.discard(one.req_id)
            # The lists are the runner's, who has more blocks come to them.
            ran = Started(request, tuple(map(list, one.block_ids)), is_absent)
            self._started[one.req_id] = ran
            started.append(ran)
        return started

    def take_started(self) -> list[Started]:
        """Return those that have run their first step, which are newcomers no more."""
        if not self._started:
            return []
        started, self._started = list(self._started.values()), {}
        return started
