"""Own the requests that wait for blocks from a lower tier, and when to ask the daemon for those blocks."""

from collections.abc import Callable, KeysView
from typing import Final

from kvlease.integrations.vllm.offload.requests import Seeker

RELOAD_SECONDS: Final = 1.0
"""Seconds that a request waits for blocks from a lower tier before they count as misses."""
POLL_SECONDS: Final = 0.002
"""Seconds between two questions whether the blocks have arrived."""


class Reloads:
    """The requests that have blocks on their way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin with no requests; the clock gives seconds."""
        self._clock = clock
        self._seekers: dict[str, Seeker] = {}
        self._poll_at = 0.0

    def __repr__(self) -> str:
        """Show life: how many requests wait."""
        return f"<Reloads of {len(self._seekers)} requests>"

    @property
    def request_ids(self) -> KeysView[str]:
        """The requests that wait."""
        return self._seekers.keys()

    def note(self, seeker: Seeker) -> None:
        """Note a request that has blocks on their way from now on."""
        seeker.pending_until = self._clock() + RELOAD_SECONDS
        self._seekers[seeker.request_id] = seeker

    def forget(self, request_id: str) -> None:
        """Forget a request that no longer waits."""
        self._seekers.pop(request_id, None)

    def due(self) -> list[tuple[Seeker, list[int]]]:
        """Return the requests that ask now, and the places they ask for; those that waited too long go on without."""
        now = self._clock()
        if not self._seekers or now < self._poll_at:
            return []
        self._poll_at = now + POLL_SECONDS
        asking = []
        for seeker in list(self._seekers.values()):
            places = seeker.pending()
            if not places or (seeker.pending_until or 0) <= now:
                seeker.miss_pending()
                self.forget(seeker.request_id)
            else:
                asking.append((seeker, places))
        return asking
