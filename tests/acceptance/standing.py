"""Daemons that stand by for the next test, because a start takes seconds; one test or module has each at a time."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from kvlease import Client, KVLeaseError
from tests.acceptance.serving import Serving

SECONDS_TO_FORGET = 20.0
"""Seconds within which the workers of an ended test are proven dead, even on a busy machine."""


class Standing:
    """Daemons without any cache, by their options.

    A returned daemon is ended if a test has stopped it for good, or if somebody still uses one of its caches.
    So tests that change more than a cache, such as the limits of tenants, need a daemon of their own.
    """

    def __init__(self, new_folder: Callable[[], Path]) -> None:
        """Begin with no daemon; each gets a folder of its own."""
        self._new_folder = new_folder
        self._free: dict[tuple[str, ...], list[Serving]] = {}
        self._ending = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for serving in (one for free in self._free.values() for one in free):
            self._ending.callback(serving.stop)
        self._ending.close()

    @contextmanager
    def lent(self, *options: str) -> Iterator[Serving]:
        """Lend a daemon with these options; it may have served other tests and their caches before."""
        free = self._free.setdefault(options, [])
        serving = free.pop() if free else Serving(self._new_folder() / "run", *options)
        is_unharmed = False
        try:
            serving.wait_until_ready()
            yield serving
            is_unharmed = _has_forgotten(serving)
        finally:
            if is_unharmed:
                free.append(serving)
            else:
                serving.stop()


def _has_forgotten(serving: Serving) -> bool:
    """Delete all caches once their users are gone; return whether that was possible."""
    end = time.monotonic() + SECONDS_TO_FORGET
    while serving.process.poll() is None and time.monotonic() < end:
        # The control process may just have been killed.
        with (
            suppress(KVLeaseError),
            Client(serving.address("unix"), on_doubt="raise") as client,
        ):
            caches = client.list_caches()
            for one in caches:
                client.delete_cache(one.cache)
            if not caches:
                return True
        time.sleep(0.02)
    return False
