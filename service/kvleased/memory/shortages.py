"""Own the caches whose memory could not be had lately: people are told, and a registration does not try again at once.

The supervisor keeps the list, too: if the kernel kills the process that populates the memory, the next one knows.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from time import monotonic
from typing import Final

from kvlease.errors import PoolFullError
from kvlease.plan import CachePlan
from kvleased.memory import regions
from kvleased.supervision.keeper import Note
from kvleased.supervision.keeper_link import KeeperLink

ADVICE: Final = "register it with fewer bytes, delete another cache, or give the daemon more memory or huge pages"
"""What to do about a shortage."""
PAUSE_SECONDS: Final = 30.0
"""Seconds from the first failure until the memory may be tried for again; doubled by each further failure."""
PAUSE_SECONDS_MAX: Final = 300.0
"""Seconds of the longest pause before the memory of a cache may be tried for again."""
TOLD_SECONDS: Final = 600.0
"""Seconds beyond the pause for which people are told of a cache that nobody registers again."""
SHORTAGES_MAX: Final = 64
"""Caches whose shortage is remembered; when there are more, the one that was noted first is forgotten."""
MAPPING_ADVICE: Final = (
    "register it with fewer blocks, delete another cache, or let the daemon's processes have more addresses and "
    "descriptors (ulimit -v, ulimit -n)"
)
"""What to do if memory exists but cannot be mapped."""
_PREFIX: Final = "shortage/"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shortage:
    digest: str
    """The digest of the cache's plan."""
    reason: str
    bytes_populated: int
    of_bytes: int
    num_failures: int
    until: float
    """When the memory may be tried for again, in monotonic seconds, which all processes of a machine share."""

    @property
    def told(self) -> str:
        times = f", {self.num_failures} times in a row" if self.num_failures > 1 else ""
        populated = f"{self.bytes_populated} of {self.of_bytes} bytes were populated"
        return f"its memory could not be allocated: {self.reason} when {populated}{times}; {ADVICE}"


class MemoryShortages:
    """The caches that were given up while their memory was populated, by name."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Start with none; the clock tells seconds."""
        self._clock = clock
        self._of: dict[str, _Shortage] = {}
        self._keeper: KeeperLink | None = None

    def __repr__(self) -> str:
        """Show life: the names of the caches."""
        return f"<MemoryShortages of {', '.join(self.names) or 'nothing'}>"

    @property
    def names(self) -> list[str]:
        """The caches that people should be told of."""
        now = self._clock()
        return [name for name, one in self._of.items() if now < one.until + TOLD_SECONDS]

    def told(self, name: str) -> str:
        """Return why there is no memory for a cache, and what to do; empty if no shortage of it is known."""
        return self._of[name].told if name in self.names else ""

    def note(
        self, name: str, plan: CachePlan, reason: str, *, bytes_populated: int, of_bytes: int
    ) -> float:
        """Note that a cache was given up for want of memory; return the seconds until it may be tried again."""
        num_failures = 1 + self.num_failures(name, plan)
        self._of.pop(name, None)
        pause_seconds = min(PAUSE_SECONDS * (1 << min(num_failures - 1, 12)), PAUSE_SECONDS_MAX)
        self._of[name] = _Shortage(
            digest=_digest(plan),
            reason=reason,
            bytes_populated=bytes_populated,
            of_bytes=of_bytes,
            num_failures=num_failures,
            until=self._clock() + pause_seconds,
        )
        self._keep(name)
        if len(self._of) > SHORTAGES_MAX:
            self.forget(next(iter(self._of)))
        return pause_seconds

    def end_pauses(self) -> None:
        """Note that memory was given back, so that all caches may be tried again; people are still told of them."""
        now = self._clock()
        for name, one in self._of.items():
            if one.until > now:
                self._of[name] = replace(one, until=now)
                self._keep(name)

    def forget(self, name: str) -> None:
        """Note that a cache has got its memory."""
        if self._of.pop(name, None) is not None and self._keeper is not None:
            self._keeper.drop(_PREFIX + name)

    def num_failures(self, name: str, plan: CachePlan) -> int:
        """Count how often in a row the memory for this very plan could not be had."""
        one = self._of.get(name)
        return 0 if one is None or one.digest != _digest(plan) else one.num_failures

    def require_none(self, name: str, plan: CachePlan) -> None:
        """Refuse a cache whose very plan has just failed; another plan may be tried.

        Raises:
            PoolFullError: the memory for this very plan could not be had a moment ago.
        """
        one = self._of.get(name)
        if one is None or one.digest != _digest(plan):
            return
        left_seconds = one.until - self._clock()
        if left_seconds > 0:
            message = f"cache {name} cannot be registered again for {left_seconds:.0f} s, because {one.told}"
            raise PoolFullError(
                message,
                resource="populated_bytes",
                need=one.of_bytes,
                available=one.bytes_populated,
                retry_after_ms=int(left_seconds * 1000) + 1,
            )

    # Restarts

    def recover(self, keeper: KeeperLink, notes: Iterable[Note]) -> None:
        """Take over the shortages of an earlier life, and have the supervisor keep all from now on."""
        self._keeper = keeper
        for note in notes:
            if not note.name.startswith(_PREFIX):
                continue
            # A build with other fields may have kept it; its meaning is not guessed then.
            if note.metadata.keys() == {field.name for field in fields(_Shortage)}:
                self._of[note.name.removeprefix(_PREFIX)] = _Shortage(**note.metadata)

    def _keep(self, name: str) -> None:
        if self._keeper is not None:
            self._keeper.note(_PREFIX + name, asdict(self._of[name]))


def _digest(plan: CachePlan) -> str:
    _, digest = regions.packed_plan(plan)
    return digest


def unmapped(error: OSError | MemoryError) -> PoolFullError:
    """Return the refusal of a cache whose memory was made, but whose records this process may not map or index."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return PoolFullError(f"its memory cannot be mapped: {reason}; {MAPPING_ADVICE}")
