"""Own the warning about an object that was dropped without a close; each object decides whether it needed one."""

import warnings


def warn_unclosed(what: object) -> None:
    """Warn of an object that is collected while it still holds things that only its close gives back."""
    message = f"unclosed {what!r}; close it, or use it in a `with` statement"
    warnings.warn(message, ResourceWarning, stacklevel=3, source=what)
