"""Own what was in order when a cache was last checked, so that checks after every event look only at what has changed.

A law is a function of what it looks at. Most commands change little, so most laws look at bytes that are the same as
when the law last held; then it still holds, and need not be checked again.
"""

from collections.abc import Callable


class Sound:
    """What laws looked at when they last held, by name; for one cache, or for several of one shape in turn."""

    def __init__(self) -> None:
        """Start with nothing known to be in order."""
        self._looked_at: dict[str, tuple[object, ...]] = {}

    def __repr__(self) -> str:
        """Show which laws held when they were last checked."""
        return f"<Sound {', '.join(self._looked_at) or 'nothing'}>"

    def unless_known(
        self, name: str, looked_at: tuple[object, ...], law: Callable[[], list[str]]
    ) -> list[str]:
        """Return what does not hold of a law; the law is not run if it held for the very same `looked_at`.

        `looked_at` is everything changeable that the law looks at; parts compared by identity must never change.
        """
        if self._looked_at.get(name) == looked_at:
            return []
        found = law()
        if not found:
            self._looked_at[name] = looked_at
        return found
