"""Own which requests nobody was asked for, because nothing of them is cached, and what the daemon is told of them.

The key counts answer key by key. A request of which its first key and the one that is sought are absent is new: it is
stored as a whole, without a question whether the pool has some of what follows. The keys of such requests go with a
later exchange, so that the daemon counts them, and ghost caches and recorded traces see them, as if asked for.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

from vllm.v1.kv_offload.base import OffloadKey

from kvlease.integrations.vllm.offload.requests import Seeker

TOLD_MAX: Final = 4_096
"""Keys that one exchange tells of at most."""
UNTOLD_MAX: Final = 65_536
"""Keys that are kept until they are told; what comes on top of them is not told."""

Absent = Callable[[Sequence[OffloadKey]], list[bool]]


class Absences:
    """What was found to be absent without a call."""

    def __init__(self, absent: Absent) -> None:
        """Take who tells of keys whether they are surely absent."""
        self.absent = absent
        self.num_misses = 0
        """Requests that were answered so."""
        self._untold: dict[str, list[OffloadKey]] = {}
        self._num_untold = 0

    def __repr__(self) -> str:
        """Show life: how many requests were answered, and how many keys the daemon does not know of."""
        return f"<Absences {self.num_misses} requests, {self._num_untold} keys to be told>"

    def misses(self, seeker: Seeker, key: OffloadKey, keys: Collection[OffloadKey]) -> bool:
        """Tell whether a key of a request is surely a miss, and note that as the answer; `keys` are all of them.

        Who asks for a second one, as where windows are sought from their end, has all of them looked at.
        """
        answers = seeker.answers
        if not answers:
            first = next(iter(keys), key)
            if not all(self.absent([key] if first == key else [first, key])):
                return False
            self.num_misses += 1
            seeker.miss((key,))
            self._note(seeker.request_id, list(keys))
            return True
        left = [one for one in keys if one not in answers]
        seeker.miss(
            one for one, is_absent in zip(left, self.absent(left), strict=True) if is_absent
        )
        return key in answers

    def ask(self, request_id: str, keys: Collection[OffloadKey]) -> None:
        """Note that the daemon is asked for keys after all, so that it is not told of them, too."""
        untold = self._untold.pop(request_id, None)
        if untold is not None:
            self._num_untold -= len(untold)
            asked = set(keys)
            self._note(request_id, [one for one in untold if one not in asked])

    def take(self) -> list[OffloadKey]:
        """Return what the next exchange tells of; it is told once, whatever becomes of the exchange."""
        taken: list[OffloadKey] = []
        while self._untold and len(taken) < TOLD_MAX:
            request_id = next(iter(self._untold))
            keys = self._untold.pop(request_id)
            room = TOLD_MAX - len(taken)
            if len(keys) > room:
                self._untold = {request_id: keys[room:], **self._untold}
            taken += keys[:room]
        self._num_untold -= len(taken)
        return taken

    def clear(self) -> None:
        """Forget what was not told: the keys mean something else from now on."""
        self._untold.clear()
        self._num_untold = 0

    def _note(self, request_id: str, keys: list[OffloadKey]) -> None:
        if self._num_untold + len(keys) <= UNTOLD_MAX:
            before = self._untold.get(request_id, [])
            self._untold[request_id] = before + keys
            self._num_untold += len(keys)
