"""Own what is to be done later: what faults have broken is mended in its time, whatever was done meanwhile."""

import heapq
import itertools
import time
from collections.abc import Callable


class Later:
    """Deeds, each with its time."""

    def __init__(self) -> None:
        """Begin with nothing to do."""
        self._deeds: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def put(self, seconds: float, deed: Callable[[], None]) -> None:
        """Have something done after so many seconds."""
        heapq.heappush(self._deeds, (time.monotonic() + seconds, next(self._order), deed))

    def do_due(self) -> None:
        """Do what is due."""
        while self._deeds and self._deeds[0][0] <= time.monotonic():
            heapq.heappop(self._deeds)[2]()

    def do_all(self) -> None:
        """Do everything now, in the order of its times."""
        while self._deeds:
            heapq.heappop(self._deeds)[2]()
