"""Own the requests that are known without a call to have nothing cached, and what the daemon is told of them.

The key counts answer for each key. If a request's first key and the key looked up are both absent, the request is new:
all of it is stored, without asking whether the pool has some later block. A later exchange carries the keys of such
requests, so that the daemon, ghost caches and recorded traces count them as if they had been asked for.
"""

from collections.abc import Callable, Collection, Sequence

from vllm.v1.kv_offload.base import OffloadKey

from kvlease.integrations.vllm.offload.requests import Seeker
from kvlease.integrations.vllm.untold import Untold

Absent = Callable[[Sequence[OffloadKey]], list[bool]]


class Absences:
    """The requests that were found absent without a call."""

    def __init__(self, absent: Absent) -> None:
        """Remember the function that tells for each key whether it is surely absent."""
        self.absent = absent
        self.num_misses = 0
        """Requests that were answered without a call."""
        self.untold: Untold[OffloadKey] = Untold()
        """The keys of these requests that the daemon has not been told of."""

    def __repr__(self) -> str:
        """Show life: how many requests were answered, and how many keys the daemon does not know of."""
        return f"<Absences {self.num_misses} requests, {len(self.untold)} keys to be told>"

    def note(self, seeker: Seeker, keys: Collection[OffloadKey]) -> None:
        """Note that a request's first key was absent, so that nothing of the request was cached."""
        for first in keys:
            self._note_new(seeker, first, keys)
            return

    def note_miss(self, seeker: Seeker, key: OffloadKey, keys: Collection[OffloadKey]) -> bool:
        """Note it if a request's key is surely a miss, and tell whether it is; `keys` are all keys of the request.

        A request that asks for a second key, as one with windows does, searching from the end, has all its keys
        checked.
        """
        answers = seeker.answers
        if not answers:
            first = next(iter(keys), key)
            if not all(self.absent([key] if first == key else [first, key])):
                return False
            self._note_new(seeker, key, keys)
            return True
        left = [one for one in keys if one not in answers]
        seeker.miss(
            one for one, is_absent in zip(left, self.absent(left), strict=True) if is_absent
        )
        return key in answers

    def _note_new(self, seeker: Seeker, key: OffloadKey, keys: Collection[OffloadKey]) -> None:
        self.num_misses += 1
        seeker.miss((key,))
        self.untold.note(seeker.request_id, keys)

    def ask(self, request_id: str, keys: Collection[OffloadKey]) -> None:
        """Note that the daemon is asked for these keys after all, so that it is not told of them again."""
        self.untold.drop(request_id, keys)
