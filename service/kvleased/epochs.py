"""Own the numbers of the daemon's lives: each is greater than all before, though the clock be set back between two."""

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvleased.telemetry import logs

FILE: Final = ".epoch"
"""The file that the last number is remembered in."""
_WRITTEN: Final = re.compile(r"[0-9]{1,10}\n", re.ASCII)
_BYTES_MAX: Final = 64


class Epochs:
    """The numbers of lives, remembered in directories of this user alone."""

    def __init__(self, directories: Sequence[Path] = ()) -> None:
        """Take where they are remembered: in several, as each may be lost for itself."""
        self._files = tuple(directory / FILE for directory in directories)
        self._last = 0

    def __repr__(self) -> str:
        """Show life."""
        return f"<Epochs last {self._last}>"

    def begin(self) -> int:
        """Return the number of a new life, and remember it: the clock's seconds, or one more than the last."""
        last = max((self._last, *map(_read, self._files)))
        self._last = max(last + 1, int(time.time()))
        for file in self._files:
            self._write(file)
        return self._last

    def _write(self, file: Path) -> None:
        """Remember the last number in a file, whole or not at all; where that cannot be done the log says so."""
        beside = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(beside, flags, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as written:
                written.write(f"{self._last}\n")
            beside.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            advice = "should the clock be set back, the next daemon's events may have lower numbers"
            logs.line(
                "warning", "epoch_not_kept", file=str(file), error=error.strerror, advice=advice
            )


def _read(file: Path) -> int:
    """Return the number in a file; 0 where there is none, or no number."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            text = os.read(fd, _BYTES_MAX).decode("ascii", "replace")
        finally:
            os.close(fd)
    except OSError:
        return 0
    return int(text) if _WRITTEN.fullmatch(text) else 0
