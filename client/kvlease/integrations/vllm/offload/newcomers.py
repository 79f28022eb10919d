"""Own the requests that vLLM's offloading scheduler has not been told of, because nothing can be loaded for them.

The scheduler keeps a request for its loads and for its stores, which are planned after its first step. A request with
nothing to load is reported in its second step, or when it ends; so no first token waits for that.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple


class Started(NamedTuple):
    """A request that has run its first step."""

    request: Any
    block_ids: tuple[list[int], ...]
    """The engine's blocks that it got for that step, by group."""
    is_absent: bool
    """Whether its first key was found absent, so that nothing of it is cached."""


class Newcomers:
    """The requests that wait, and those that have run their first step."""

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

    def known(self, request_ids: Iterable[str], scheduler: Any) -> list[str]:
        """Return those requests of which the manager will be told that they end; others have ended."""
        statuses = scheduler._req_status  # noqa: SLF001 - probed at import of the connector
        return [
            one
            for one in request_ids
            if self.is_started(one) or (one in statuses and not statuses[one].finished_signaled)
        ]

    def note_absent(self, request_id: str) -> None:
        """Note that surely nothing of a waiting request is cached."""
        self._absent.add(request_id)

    def first(self, most: int) -> list[Any]:
        """Return up to `most` waiting requests, in the order in which they arrived."""
        return list(islice(self.waiting.values(), most))

    def leave(self, request_id: str) -> None:
        """Forget a waiting request."""
        self.waiting.pop(request_id, None)
        self._absent.discard(request_id)

    def start(self, scheduled: Iterable[Any]) -> list[Started]:
        """Note which requests run their first step, given vLLM's data of each; return those that were waiting here."""
        started = []
        for one in scheduled:
            request = self.waiting.pop(one.req_id, None)
            if request is None:
                continue
            is_absent = one.req_id in self._absent
            self._absent.discard(one.req_id)
            # The lists are copied because they are the runner's, which appends blocks to them.
            ran = Started(request, tuple(map(list, one.block_ids)), is_absent)
            self._started[one.req_id] = ran
            started.append(ran)
        return started

    def take_started(self) -> list[Started]:
        """Return the requests that have run their first step, and forget them."""
        if not self._started:
            return []
        started, self._started = list(self._started.values()), {}
        return started
