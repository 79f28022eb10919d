"""Own the taking of changed tokens and certificates while the daemon runs; callers say what is done with them.

A change on disk is taken as a whole or not at all: if the files cannot be used, the old ones stay in force. A
certificate that is not valid by its dates counts as unusable, too, because clients that check it would refuse it; so
does an authority of clients, because the daemon would refuse all of them.
"""

import asyncio
import errno
import math
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from kvleased.access import tokens
from kvleased.access.roles import Role
from kvleased.access.tokens import Keyring
from kvleased.credentials.tls import TlsFiles, Validity, validities, validity
from kvleased.system.directories import UnusableError

TOKENS: Final = "tokens"
CERTIFICATE: Final = "certificate"
"""The two kinds of credentials that are watched."""
LOOK_SECONDS: Final = 5.0
"""Seconds between two looks at the files."""
_NOT_THE_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about the files: they may be readable at the next look."""
_LOG = structlog.get_logger()

_Stamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, modification time in nanoseconds, and bytes of each file; None for a missing file."""


@dataclass(slots=True)
class _Watched:
    """Files that are taken together."""

    paths: tuple[Path, ...]
    take: Callable[[], None]
    """Takes what is in the files; raises UnusableError."""
    seen: _Stamp
    is_stale: bool = False
    valid_at: float = math.inf
    """The second since 1970 from which the unchanged files can be taken, if they could not be yet."""


class OutOfDateError(UnusableError):
    """A certificate, or the authority of clients' certificates, is not valid yet, or no longer."""

    def __init__(self, message: str, *, valid_at: float) -> None:
        """Take the message, and the second since 1970 from which it is valid; infinity if it has ended."""
        super().__init__(message)
        self.valid_at = valid_at


class Renewal:
    """Watches the files of tokens and certificates, and takes what has changed."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """Watch nothing yet; `now` returns the seconds since 1970."""
        self._now = now
        self._watched: dict[str, _Watched] = {}
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Show what is watched, and what could not be taken."""
        stale = [what for what, is_stale in self.stale.items() if is_stale]
        return f"<Renewal of {', '.join(self._watched) or 'nothing'}, stale: {', '.join(stale) or 'none'}>"

    @property
    def stale(self) -> Mapping[str, bool]:
        """Whether the files of `tokens` and of `certificate` cannot be used, so that the old ones are in force."""
        return {what: watched.is_stale for what, watched in self._watched.items()}

    def watch_tokens(self, paths: Mapping[Role, Path], take: Callable[[Keyring], None]) -> None:
        """Call `take` with the tokens whenever their files change from now on; call this before reading them."""
        if paths:
            self._watch(TOKENS, paths.values(), lambda: take(tokens.load(paths)))

    def watch_certificate(self, files: TlsFiles | None, take: Callable[[TlsFiles], None]) -> None:
        """Call `take` whenever the TLS files change from now on; if they cannot be used, it raises UnusableError.

        It is not called with a certificate or an authority that is not valid by its dates. If that holds for those of
        now, they serve all the same, as the local sockets need none, and a warning is logged.
        """
        if files is None:
            return

        def take_valid() -> None:
            _check_dates(files, self._now())
            take(files)

        paths = (files.cert_file, files.key_file, files.client_ca_file)
        self._watch(CERTIFICATE, (path for path in paths if path), take_valid)
        try:
            _check_dates(files, self._now())
        except OutOfDateError as error:
            self._put_off(CERTIFICATE, error)
            _LOG.warning(
                "certificate_out_of_date",
                error=str(error),
                advice="it is used all the same, and no client that is checked by it, or checks it, can connect; "
                "replace it with one that is valid now, a certificate with its key: no restart is needed",
            )

    def start(self) -> None:
        """Look at the files now and then from now on."""
        self._looking = asyncio.get_running_loop().create_task(self._look_on())

    def stop(self) -> None:
        """Stop looking."""
        if self._looking is not None:
            self._looking.cancel()

    def look(self, *, is_told: bool = False) -> None:
        """Take the files that have changed, or all files if `is_told`."""
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
                    advice="the old one stays in force until the control process restarts; replace this one with one "
                    "that is valid now, a certificate with its key",
                )
            except UnusableError as error:
                if _is_no_fault_of_the_files(error):
                    self._try_again(what, error)
                else:
                    self.note_unusable(what, error)
            else:
                watched.is_stale = False
                _LOG.info("credentials_taken", what=what)

    def note_unusable(self, what: str, error: UnusableError) -> None:
        """Note and log that files cannot be used, so that the old ones stay in force."""
        self._watched[what].is_stale = True
        _LOG.error(
            "credentials_not_taken",
            what=what,
            error=str(error),
            advice=(
                "the old ones stay in force until the daemon ends, and it cannot start again "
                "with these; correct them"
            ),
        )

    def _try_again(self, what: str, error: UnusableError) -> None:
        """Note that files could not be read now, so that the next look takes them; log it once."""
        watched = self._watched[what]
        watched.valid_at = -math.inf
        if not watched.is_stale:
            watched.is_stale = True
            _LOG.warning(
                "credentials_not_taken",
                what=what,
                error=str(error),
                advice="the old ones stay in force until these can be read, which is tried again and again",
            )

    def _put_off(self, what: str, error: OutOfDateError) -> None:
        """Note that a certificate is to be taken once it is valid, if it ever will be."""
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


def _is_no_fault_of_the_files(error: UnusableError) -> bool:
    cause = error.__cause__
    if not isinstance(cause, OSError) or isinstance(cause, ssl.SSLError):
        # The numbers of OpenSSL's errors are its own.
        return False
    return cause.errno in _NOT_THE_FILES


def _check_dates(files: TlsFiles, now: float) -> None:
    """Raise OutOfDateError if the certificate, or each authority, is not valid now.

    What cannot be read is judged elsewhere.
    """
    if (found := validity(files.cert_file)) is not None:
        _check(f"the certificate in {files.cert_file}", [found], now)
    if files.client_ca_file is not None:
        authorities = list(validities(files.client_ca_file))
        _check(
            f"the authority of clients' certificates in {files.client_ca_file}", authorities, now
        )


def _check(what: str, found: Sequence[Validity], now: float) -> None:
    if not found or any(one.begins_at <= now <= one.ends_at for one in found):
        return
    later = [one.begins_at for one in found if one.begins_at > now]
    if later:
        message = f"{what} is not valid before {_moment(min(later))}, and it is now {_moment(now)}"
        raise OutOfDateError(message, valid_at=min(later))
    last = max(one.ends_at for one in found)
    message = f"{what} expired at {_moment(last)}, and it is now {_moment(now)}"
    raise OutOfDateError(message, valid_at=math.inf)


def _moment(second: float) -> str:
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _stamp(paths: Iterable[Path]) -> _Stamp:
    """Return a stamp that changes when a file is written or replaced, even behind a link."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)
