"""Own the rule by which a daemon and its clients find the same directory; who may enter it is the daemon's business."""

import os
from pathlib import Path
from typing import Final

RUNTIME_VARIABLE: Final = "KVLEASED_RUNTIME_DIR"
"""The environment variable that sets the daemon's directory, and by which clients on the node find it."""

ADDRESS_VARIABLE: Final = "KVLEASE_ADDRESS"
"""The environment variable that has the daemon's address if a caller gives none."""

PAGE_FILE: Final = "page.url"
"""The file in the daemon's directory that has the address of its page, without the path."""

LOCK_FILE: Final = "kvleased.lock"
"""The file in the daemon's directory that its supervisor keeps locked for as long as it lives."""


def runtime_directory() -> Path:
    """Return the directory of this user's daemon, with its sockets and tokens, unless its settings say otherwise.

    It is KVLEASED_RUNTIME_DIR if that is set, else `kvlease` below XDG_RUNTIME_DIR, else /tmp/kvlease-UID. It is never
    below TMPDIR, which may differ for each session of a user, who then would not find the daemon again.
    """
    if named := os.environ.get(RUNTIME_VARIABLE):
        return Path(os.path.abspath(named))  # noqa: PTH100 - a link may be pointed elsewhere later
    base = os.environ.get("XDG_RUNTIME_DIR")
    # The daemon makes its directory with mode 0700, even in /tmp.
    return Path(base, "kvlease") if base else Path(f"/tmp/kvlease-{os.getuid()}")  # noqa: S108
