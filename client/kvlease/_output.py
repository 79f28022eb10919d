"""Own what happens if output cannot be written: characters are escaped, anything else ends with a line and a status."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Final

_OF_OUTPUT: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Error numbers of a write to a full or broken device."""


@contextlib.contextmanager
def written_or_refused(program: str) -> Iterator[None]:
    """End the program with status 1 if its output cannot be written; other errors propagate.

    A character that the terminal's encoding lacks, such as one in a tenant's name, is printed as its escape.

    Raises:
        SystemExit: standard output cannot be written; standard error says why.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        # An error with a file name comes from a file that was opened, not from the output.
        if error.errno not in _OF_OUTPUT or error.filename is not None:
            raise
        _drop_output()
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{program}: cannot write its output: {error.strerror}\n")
        raise SystemExit(1) from None


def _drop_output() -> None:
    """Discard what is still buffered: writing it would fail again when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
