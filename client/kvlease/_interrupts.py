"""Own what ^C does while a command is still being imported: it ends the process at once and without a traceback."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Have SIGINT end the process as if Python had no handler for it; one that is ignored or handled stays so."""
    is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_pythons:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_pythons:
            signal.signal(signal.SIGINT, signal.default_int_handler)
