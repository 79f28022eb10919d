"""Own which files can be drawn into, and find the module that draws; other modules decide what is drawn."""

import importlib
import os
from pathlib import Path
from typing import Any, Final

from kvlease.errors import InvalidError

SUFFIXES: Final = (".png", ".svg")
"""The kinds of file that can be drawn."""


def drawing(module: str, path: Path) -> Any:
    """Return the module that draws; called first, so that nothing is computed in vain.

    Raises:
        InvalidError: the file is of another kind or cannot be written, or matplotlib is not installed.
    """
    check(path)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = '--plot needs matplotlib; in a clone, install it with: pip install ".[plot]"'
        raise InvalidError(message, resource="plot") from error


def check(path: Path) -> None:
    """Refuse a file that cannot be drawn into, without writing anything.

    Raises:
        InvalidError: it is of another kind, or cannot be written.
    """
    if path.suffix not in SUFFIXES:
        message = f"--plot is {path.name!r}; it must end in {' or '.join(SUFFIXES)}"
        raise InvalidError(message, resource="plot")
    if path.is_dir():
        reason = "it is a directory"
    elif not path.parent.is_dir():
        reason = "there is no such directory"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise InvalidError(f"cannot write {path}: {reason}", resource="plot")
