"""Own the root secret of a supervisor's life: where it comes from, and that its file is restored while it is in use."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Final

import structlog

from kvleased.credentials import secret
from kvleased.supervision.keeper import Kept
from kvleased.supervision.keeper_link import KeeperLink
from kvleased.system.directories import UnusableError

_KEPT_AS: Final = "root_secret"
_LOG = structlog.get_logger()


async def load(kept: Sequence[Kept], keeper: KeeperLink, path: Path | None) -> bytes:
    """Return the secret of this supervisor's life; if there is none yet, read it from its file, or make one.

    Raises:
        UnusableError: the file is no longer as it was when the supervisor started.
    """
    fds = [item.fd for item in kept if item.name == _KEPT_AS]
    fd = fds[0] if fds else await keeper.create(_KEPT_AS, secret.NUM_BYTES, {})
    try:
        found = os.pread(fd, secret.NUM_BYTES, 0)
        if not any(found):
            # The region is new, or its maker was killed before it wrote: either way nobody has seen a key made with it.
            found = secrets.token_bytes(secret.NUM_BYTES) if path is None else secret.read(path)
            os.pwrite(fd, found, 0)
    finally:
        os.close(fd)
    return found


def restore_aside(path: Path, content: bytes) -> None:
    """Write the secret to its file again if the file has gone, without waiting for the disk."""
    Thread(target=_restore, args=(path, content), name="secret", daemon=True).start()


def _restore(path: Path, content: bytes) -> None:
    try:
        secret.restore(path, content)
    except UnusableError as error:
        _LOG.error("secret_not_kept", error=str(error))
