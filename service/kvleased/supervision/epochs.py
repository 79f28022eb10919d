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

    def __init__(self, directories: Sequence[Path] = ()) -> None:
        """Take the directories that remember them: several, as any one may be lost."""
        self._files = tuple(directory / FILE for directory in directories)
        self._last = 0

    def __repr__(self) -> str:
        """Show life."""
        return f"<Epochs last {self._last}>"

    def begin(self) -> int:
        """Return and remember the epoch of a new life: the clock's seconds or the last epoch + 1, if that is more."""
        last = max((self._last, *map(_read, self._files)))
        self._last = max(last + 1, int(time.time()))
        for file in self._files:
            self._write(file)
        return self._last

    def _write(self, file: Path) -> None:
        """Write the last epoch into a file, whole or not at all; log if that fails."""
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
            advice = (
                "if the clock is set back, the events of the next daemon may have lower numbers"
            )
            logs.line(
                "warning", "epoch_not_kept", file=str(file), error=error.strerror, advice=advice
            )


def _read(file: Path) -> int:
    """Return the number in a file; 0 if there is no file, or no number in it."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            text = os.read(fd, _BYTES_MAX).decode("ascii", "replace")
        finally:
            os.close(fd)
    except OSError:
        return 0
    return int(text) if _WRITTEN.fullmatch(text) else 0
