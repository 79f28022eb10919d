"""Own the keys that an engine knew to be absent without a call, until the daemon is told that they were missed.

A later exchange carries them, so that the daemon, ghost caches and recorded traces count them as if they had been asked
for.
"""

from collections.abc import Collection, Hashable
from typing import Final, Generic, TypeVar

TOLD_MAX: Final = 4_096
"""Keys that one exchange tells of, at most."""
UNTOLD_MAX: Final = 65_536
"""Keys that are kept to be told, at most; further keys are never told."""

Key = TypeVar("Key", bound=Hashable)


class Untold(Generic[Key]):
    """The untold keys of each request, in whatever form the engine has them."""

    def __init__(self) -> None:
        """Begin with no keys."""
        self._keys: dict[Hashable, list[Key]] = {}
        self._num_keys = 0

    def __repr__(self) -> str:
        """Show life: how many keys the daemon does not know of."""
        return f"<Untold {self._num_keys} keys>"

    def __len__(self) -> int:
        return self._num_keys

    def note(self, request: Hashable, keys: Collection[Key]) -> None:
        """Remember the keys that a request missed; they replace any earlier ones of it."""
        self.drop(request)
        if keys and self._num_keys + len(keys) <= UNTOLD_MAX:
            self._keys[request] = list(keys)
            self._num_keys += len(keys)

    def drop(self, request: Hashable, asked: Collection[Key] | None = None) -> None:
        """Forget a request's keys in `asked`, for which the daemon is asked after all; None means all of its keys."""
        untold = self._keys.pop(request, [])
        self._num_keys -= len(untold)
        if asked is not None and untold:
            known = set(asked)
            self.note(request, [key for key in untold if key not in known])

    def take(self) -> list[Key]:
        """Return the keys that the next exchange tells of; they are told once, whatever becomes of the exchange."""
        taken: list[Key] = []
        while self._keys and len(taken) < TOLD_MAX:
            request = next(iter(self._keys))
            keys = self._keys.pop(request)
            room = TOLD_MAX - len(taken)
            if len(keys) > room:
                self._keys = {request: keys[room:], **self._keys}
            taken += keys[:room]
        self._num_keys -= len(taken)
        return taken

    def clear(self) -> None:
        """Forget all keys: they mean something else from now on."""
        self._keys.clear()
        self._num_keys = 0
