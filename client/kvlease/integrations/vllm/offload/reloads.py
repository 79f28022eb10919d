"""Own which requests wait for blocks that a lower tier brings, and when the daemon is asked whether they are there."""

from collections.abc import Callable, KeysView
from typing import Final

from kvlease.integrations.vllm.offload.requests import Seeker

RELOAD_SECONDS: Final = 1.0
"""Seconds that a request waits for blocks of a lower tier; then they are misses."""
POLL_SECONDS: Final = 0.002
"""Seconds between two questions whether they are there."""


class Reloads:
    """The requests of which blocks are on their way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin with none; the clock tells seconds."""
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
        """Note a request of which blocks are on their way from now on."""
        seeker.pending_until = self._clock() + RELOAD_SECONDS
        self._seekers[seeker.request_id] = seeker

    def forget(self, request_id: str) -> None:
        """Let go of a request that waits no more."""
        self._seekers.pop(request_id, None)

    def due(self) -> list[tuple[Seeker, list[int]]]:
        """Return who asks now, and the places of what it asks for; who has waited long enough goes on without it."""
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
