"""Own the rule by which a daemon and those who look for it come to one directory; who may enter it is the daemon's."""

import os
from pathlib import Path
from typing import Final

RUNTIME_VARIABLE: Final = "KVLEASED_RUNTIME_DIR"
"""The environment variable that sets the daemon's directory, and by which others on the node find it."""

ADDRESS_VARIABLE: Final = "KVLEASE_ADDRESS"
"""The environment variable that names the daemon where a caller does not."""

PAGE_FILE: Final = "page.url"
"""The file in that directory in which a daemon leaves the address of its page, less the path."""


def runtime_directory() -> Path:
    """Return where a daemon of this user has its sockets and tokens, unless its command line or its file say otherwise.

    It is KVLEASED_RUNTIME_DIR where that is set, else `kvlease` below XDG_RUNTIME_DIR, else /tmp/kvlease-UID: never
    below TMPDIR, which may be another one for each session of a user, who would not find the daemon again.
    """
    if named := os.environ.get(RUNTIME_VARIABLE):
        return Path(os.path.abspath(named))  # noqa: PTH100 - a link may be pointed elsewhere later
    base = os.environ.get("XDG_RUNTIME_DIR")
    # The daemon makes its directory with mode 0700, in /tmp too.
    return Path(base, "kvlease") if base else Path(f"/tmp/kvlease-{os.getuid()}")  # noqa: S108
