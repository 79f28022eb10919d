"""Own the check whether the sockets are still where clients look for them; only a restart makes them anew."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import structlog

LOOK_SECONDS: Final = 1.0
"""Seconds between two looks at the files."""
_LOG = structlog.get_logger()


class Presence:
    """Looks whether files are still those of the start, and tells when some are gone, and when they are back."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Take the function that is told why clients cannot connect, or "" when they can again."""
        self._tell = tell
        self._files: dict[Path, tuple[int, int] | None] = {}
        self._reason = ""
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Show life."""
        return f"<Presence of {len(self._files)} files{', lost' * bool(self._reason)}>"

    def start(self, paths: Iterable[Path]) -> None:
        """Take note of files that should be there, and look after them from now on."""
        self._files = {path: _identity(path) for path in paths}
        self._looking = asyncio.create_task(self._look_again())

    def stop(self) -> None:
        """Stop looking."""
        if self._looking is not None:
            self._looking.cancel()

    def look(self) -> None:
        """Tell if something has changed since the last look."""
        lost = [
            path
            for path, identity in self._files.items()
            if identity is None or _identity(path) != identity
        ]
        reason = (
            f"{', '.join(map(str, lost))} was removed or replaced, so no client can connect there; make sure that "
            "nothing cleans up --runtime-dir, and restart the daemon, which then creates its sockets again"
            if lost
            else ""
        )
        if reason == self._reason:
            return
        self._reason = reason
        self._tell(reason)
        if lost:
            _LOG.error("sockets_lost", paths=[str(path) for path in lost], advice=reason)
        else:
            _LOG.info("sockets_found", paths=[str(path) for path in self._files])

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
