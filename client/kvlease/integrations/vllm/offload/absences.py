"""Own which requests nobody was asked for, because nothing of them is cached, and what the daemon is told of them.

The key counts answer key by key. A request of which its first key and the one that is sought are absent is new: it is
stored as a whole, without a question whether the pool has some of what follows. The keys of such requests go with a
later exchange, so that the daemon counts them, and ghost caches and recorded traces see them, as if asked for.
"""

from collections.abc import Callable, Collection, Sequence

from vllm.v1.kv_offload.base import OffloadKey

from kvlease.integrations.vllm.offload.requests import Seeker
from kvlease.integrations.vllm.untold import Untold

Absent = Callable[[Sequence[OffloadKey]], list[bool]]


class Absences:
    """What was found to be absent without a call."""

    def __init__(self, absent: Absent) -> None:
        """Take who tells of keys whether they are surely absent."""
        self.absent = absent
        self.num_misses = 0
        """Requests that were answered so."""
        self.untold: Untold[OffloadKey] = Untold()
        """Their keys, until the daemon was told of them."""

    def __repr__(self) -> str:
        """Show life: how many requests were answered, and how many keys the daemon does not know of."""
        return f"<Absences {self.num_misses} requests, {len(self.untold)} keys to be told>"

    def note(self, seeker: Seeker, keys: Collection[OffloadKey]) -> None:
        """Note that the first of all keys of a request was absent; then nothing that begins with it was there."""
        for first in keys:
            self._note_new(seeker, first, keys)
            return

    def misses(self, seeker: Seeker, key: OffloadKey, keys: Collection[OffloadKey]) -> bool:
        """Tell whether a key of a request is surely a miss, and note that as the answer; `keys` are all of them.

        Who asks for a second one, as where windows are sought from their end, has all of them looked at.
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
        """Note that the daemon is asked for keys after all, so that it is not told of them, too."""
        self.untold.drop(request_id, keys)
