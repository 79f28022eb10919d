"""Own the taking of changed tokens and certificates while the daemon runs; what is done with them is told to it.

What has changed on disk is taken as a whole or not at all: where it cannot be used, the old stays in force. A
certificate that is not valid by its dates is of no use to anybody who checks it, so that it is taken for such a file.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from kvleased.access import tokens
from kvleased.access.roles import Role
from kvleased.access.tokens import Keyring
from kvleased.api.tls import TlsFiles, validity
from kvleased.directories import UnusableError

TOKENS: Final = "tokens"
CERTIFICATE: Final = "certificate"
"""What is watched."""
LOOK_SECONDS: Final = 5.0
"""Seconds between two looks at the files."""
_LOG = structlog.get_logger()

_Stamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, change in nanoseconds and bytes of each file; None where there is none."""


@dataclass(slots=True)
class _Watched:
    """Files that go together."""

    paths: tuple[Path, ...]
    take: Callable[[], None]
    """Takes what is in them; raises UnusableError."""
    seen: _Stamp
    is_stale: bool = False
    valid_at: float = math.inf
    """The second since 1970 from which what could not be taken can be, unchanged."""


class OutOfDateError(UnusableError):
    """A certificate is not valid yet, or no more."""

    def __init__(self, message: str, *, valid_at: float) -> None:
        """Say so, and from which second since 1970 it is valid; infinity where it has ended."""
        super().__init__(message)
        self.valid_at = valid_at


class Renewal:
    """What was read of the files of tokens and certificates, and what is in them now."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """Watch nothing yet; `now` is the second since 1970."""
        self._now = now
        self._watched: dict[str, _Watched] = {}
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Show what could not be taken."""
        stale = [what for what, is_stale in self.stale.items() if is_stale]
        return f"<Renewal of {', '.join(self._watched) or 'nothing'}, stale: {', '.join(stale) or 'none'}>"

    @property
    def stale(self) -> Mapping[str, bool]:
        """Of `tokens` and `certificate`, whether what is on disk cannot be used, so that the old is in force."""
        return {what: watched.is_stale for what, watched in self._watched.items()}

    def watch_tokens(self, paths: Mapping[Role, Path], take: Callable[[Keyring], None]) -> None:
        """Have `take` called with the tokens whenever they have changed since now; call it before they are read."""
        if paths:
            self._watch(TOKENS, paths.values(), lambda: take(tokens.load(paths)))

    def watch_certificate(self, files: TlsFiles | None, take: Callable[[TlsFiles], None]) -> None:
        """Have `take` called when the files of TLS have changed since now; it raises UnusableError, taking nothing.

        It is not called with a certificate that is not valid by its dates. One that is there now is served with all the
        same, as the local sockets need none: that is told.
        """
        if files is None:
            return

        def take_valid() -> None:
            _check_dates(files.cert_file, self._now())
            take(files)

        paths = (files.cert_file, files.key_file, files.client_ca_file)
        self._watch(CERTIFICATE, (path for path in paths if path), take_valid)
        try:
            _check_dates(files.cert_file, self._now())
        except OutOfDateError as error:
            self._put_off(CERTIFICATE, error)
            _LOG.warning(
                "certificate_out_of_date",
                error=str(error),
                advice="it is served with, and clients that check it refuse it; put one that is valid now, with its "
                "key, in its place: it is taken without a restart",
            )

    def start(self) -> None:
        """Look now and then from now on."""
        self._looking = asyncio.get_running_loop().create_task(self._look_on())

    def stop(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()

    def look(self, *, is_told: bool = False) -> None:
        """Take what has changed; where one `is_told` to, also what has not."""
        for what, watched in self._watched.items():
            stamp = _stamp(watched.paths)
            is_valid_now = self._now() >= watched.valid_at
            if stamp == watched.seen and not is_told and not is_valid_now:
                continue
            watched.seen = stamp
            watched.valid_at = math.inf
            try:
                watched.take()
            except OutOfDateError as error:
                self._put_off(what, error)
                _LOG.warning(
                    "credentials_not_taken",
                    what=what,
                    error=str(error),
                    advice="the old one stays in force, until a restart of the control process; put one that is valid "
                    "now, with its key, in its place",
                )
            except UnusableError as error:
                self.note_unusable(what, error)
            else:
                watched.is_stale = False
                _LOG.info("credentials_taken", what=what)

    def note_unusable(self, what: str, error: UnusableError) -> None:
        """Tell that files cannot be used, so that the old ones are in force."""
        self._watched[what].is_stale = True
        _LOG.error(
            "credentials_not_taken",
            what=what,
            error=str(error),
            advice="the old ones stay in force until the daemon ends, which does not start again with these; mend them",
        )

    def _put_off(self, what: str, error: OutOfDateError) -> None:
        """Have it taken once it is valid, where it will be."""
        watched = self._watched[what]
        watched.is_stale = True
        watched.valid_at = error.valid_at

    def _watch(self, what: str, paths: Iterable[Path], take: Callable[[], None]) -> None:
        watched = tuple(paths)
        self._watched[what] = _Watched(watched, take, _stamp(watched))

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()


def _check_dates(cert_file: Path, now: float) -> None:
    """Raise OutOfDateError where a certificate is not valid now; what cannot be read is not for us to judge."""
    found = validity(cert_file)
    if found is None:
        return
    if now > found.ends_at:
        message = f"the certificate in {cert_file} ended at {_moment(found.ends_at)}, and now is {_moment(now)}"
        raise OutOfDateError(message, valid_at=math.inf)
    if now < found.begins_at:
        message = (
            f"the certificate in {cert_file} begins at {_moment(found.begins_at)} only, and now is {_moment(now)}; "
            "it is taken by then"
        )
        raise OutOfDateError(message, valid_at=found.begins_at)


def _moment(second: float) -> str:
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _stamp(paths: Iterable[Path]) -> _Stamp:
    """Return what changes when a file is written or another takes its place, be it behind a link."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)
