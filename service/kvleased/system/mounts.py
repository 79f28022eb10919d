"""Own what the kernel tells of the file system that a file is on."""

import os
from pathlib import Path
from typing import NamedTuple


class Mount(NamedTuple):
    """A mounted file system."""

    kind: str
    """Such as tmpfs."""
    options: dict[str, str]
    """The file system's own options; one without a value has ""."""


def mount_of(device: int) -> Mount | None:
    """Return the mount with this device number; None if the kernel names none, as for the file of memfd_create."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mounted, _, rest = line.partition(" - ")
        if mounted.split()[2] == wanted:
            kind, *_, options = rest.split()
            return Mount(kind, dict(one.partition("=")[::2] for one in options.split(",")))
    return None
