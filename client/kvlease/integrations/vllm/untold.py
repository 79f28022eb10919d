"""Own the keys that an engine knew to be absent without a call, until the daemon is told that they were missed.

They go with a later exchange, so that the daemon counts them, and ghost caches and recorded traces see them, as if
asked for.
"""

from collections.abc import Collection, Hashable
from typing import Final, Generic, TypeVar

TOLD_MAX: Final = 4_096
"""Keys that one exchange tells of at most."""
UNTOLD_MAX: Final = 65_536
"""Keys that are kept until they are told; what comes on top of them is not told."""

Key = TypeVar("Key", bound=Hashable)


class Untold(Generic[Key]):
    """Keys by the request that missed them, in whatever form the engine has them."""

    def __init__(self) -> None:
        """Begin with none."""
        self._keys: dict[Hashable, list[Key]] = {}
        self._num_keys = 0

    def __repr__(self) -> str:
        """Show life: how many keys the daemon does not know of."""
        return f"<Untold {self._num_keys} keys>"

    def __len__(self) -> int:
        return self._num_keys

    def note(self, request: Hashable, keys: Collection[Key]) -> None:
        """Remember what a request missed; of one that is there already it is these alone."""
        self.drop(request)
        if keys and self._num_keys + len(keys) <= UNTOLD_MAX:
            self._keys[request] = list(keys)
            self._num_keys += len(keys)

    def drop(self, request: Hashable, asked: Collection[Key] | None = None) -> None:
        """Forget those of a request's keys that the daemon is asked for after all; None: all of them."""
        untold = self._keys.pop(request, [])
        self._num_keys -= len(untold)
        if asked is not None and untold:
            known = set(asked)
            self.note(request, [key for key in untold if key not in known])

    def take(self) -> list[Key]:
        """Return what the next exchange tells of; it is told once, whatever becomes of the exchange."""
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
        """Forget what was not told: the keys mean something else from now on."""
        self._keys.clear()
        self._num_keys = 0
