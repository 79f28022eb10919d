"""Own the epochs: each is greater than all before, even if the clock is set back between two lives."""

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvleased.telemetry import logs

FILE: Final = ".epoch"
"""The file that remembers the last epoch."""
_WRITTEN: Final = re.compile(r"[0-9]{1,10}\n", re.ASCII)
_BYTES_MAX: Final = 64


class Epochs:
    """The epochs, remembered in directories that only this user may enter."""

    def __init__(self, directories: Sequence[tuple[Path, int | None]] = ()) -> None:
        """Take the directories that remember them: several, as any one may be lost.

        A directory that has a descriptor is that one, even if its path leads elsewhere.
        """
        self._directories = tuple(directories)
        self._last = 0

    def __repr__(self) -> str:
        """Show life."""
        return f"<Epochs last {self._last}>"

    def begin(self) -> int:
        """Return and remember the epoch of a new life: the clock's seconds or the last epoch + 1, if that is more."""
        last = max((self._last, *(_read(*one) for one in self._directories)))
        self._last = max(last + 1, int(time.time()))
        for directory, directory_fd in self._directories:
            self._write(directory, directory_fd)
        return self._last

    def _write(self, directory: Path, directory_fd: int | None) -> None:
        """Write the last epoch into a directory's file, whole or not at all; log if that fails."""
        file = _in(directory, directory_fd)
        beside = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(beside, flags, 0o600, dir_fd=directory_fd)
            with os.fdopen(fd, "w", encoding="ascii") as written:
                written.write(f"{self._last}\n")
            os.replace(beside, file, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(beside, dir_fd=directory_fd)
            advice = (
                "if the clock is set back, the events of the next daemon may have lower numbers"
            )
            logs.line(
                "warning",
                "epoch_not_kept",
                file=str(directory / FILE),
                error=error.strerror,
                advice=advice,
            )


def _in(directory: Path, directory_fd: int | None) -> Path:
    """Return the file's path: from the directory if that has a descriptor."""
    return Path(FILE) if directory_fd is not None else directory / FILE


def _read(directory: Path, directory_fd: int | None) -> int:
    """Return the number in a directory's file; 0 if there is no file, or no number in it."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(_in(directory, directory_fd), flags, dir_fd=directory_fd)
        try:
            text = os.read(fd, _BYTES_MAX).decode("ascii", "replace")
        finally:
            os.close(fd)
    except OSError:
        return 0
    return int(text) if _WRITTEN.fullmatch(text) else 0
