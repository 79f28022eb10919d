"""Own what people are told if a disk store or the file system under it fails, and what they can do about it."""

import errno
from collections.abc import Mapping
from typing import Final

_ADVICE: Final[Mapping[int, str]] = {
    errno.EACCES: "Permission denied; give the daemon's user access to it and to the directories above it",
    errno.EDQUOT: "Disk quota exceeded; raise the quota, or give the caches fewer disk_bytes",
    errno.EFBIG: (
        "File too large; raise the limit on the size of files (ulimit -f, LimitFSIZE), choose a disk_dir on another "
        "file system, or give the cache fewer disk_bytes"
    ),
    errno.EISDIR: "Is a directory; move it away",
    errno.ELOOP: "a symbolic link is in the way; move it away",
    errno.ENOENT: "No such file or directory; put it back",
    errno.ENOSPC: "No space left on device; free some space, or give the caches fewer disk_bytes",
    errno.ENOTDIR: "Not a directory; move it away, or choose another disk_dir",
    errno.ENXIO: "a socket is in the way; move it away",
    errno.EROFS: "Read-only file system; mount it writable, or choose another disk_dir",
}
"""What to do, by the kernel's error number; other errors are told in the kernel's words."""


class StoreError(Exception):
    """The store as a whole does not work; the text says why, for people."""


def told(error: OSError) -> str:
    """Return what the kernel objects to and, if known, what to do about it."""
    reason = error.strerror or type(error).__name__
    return _ADVICE.get(error.errno or 0, reason)
