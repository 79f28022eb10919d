"""Own the warning about what was dropped without a close; whether it had to be closed is its own business."""

import warnings


def warn_unclosed(what: object) -> None:
    """Warn of something that is collected while it still holds what only its close gives back."""
    message = f"unclosed {what!r}; close it, or begin it with `with`"
    warnings.warn(message, ResourceWarning, stacklevel=3, source=what)
