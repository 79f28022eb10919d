"""Own what was in order when a cache was checked last, so that who checks after every event sees each thing but once.

A law is a function of what it looks at. Most commands change little, so most of what a law looks at is byte for byte
what it was when the law held last; then it holds of it still, and need not be gone through again.
"""

from collections.abc import Callable


class Sound:
    """What laws looked at when they held last, by name; for one cache, or for several of one shape in turn."""

    def __init__(self) -> None:
        """Start with nothing that is known to be in order."""
        self._looked_at: dict[str, tuple[object, ...]] = {}

    def __repr__(self) -> str:
        """Show which laws held when they were gone through last."""
        return f"<Sound {', '.join(self._looked_at) or 'nothing'}>"

    def unless_known(
        self, name: str, looked_at: tuple[object, ...], law: Callable[[], list[str]]
    ) -> list[str]:
        """Return what does not hold of a law, which need not be asked if it held of the very same.

        `looked_at` is all that the law goes by and that ever changes; what is compared by identity must never change.
        """
        if self._looked_at.get(name) == looked_at:
            return []
        found = law()
        if not found:
            self._looked_at[name] = looked_at
        return found
