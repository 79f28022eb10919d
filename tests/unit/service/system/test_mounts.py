"""The kernel's list of mounts tells what a file is on."""

import os
from pathlib import Path

from kvleased.system.mounts import mount_of


def test_mount_of_a_file_is_told() -> None:
    """The kind and the options are those of the file system that the file is on."""
    mount = mount_of(Path("/proc/self/mountinfo").stat().st_dev)

    assert mount is not None
    assert mount.kind == "proc"
    assert mount.options["rw"] == ""


def test_file_on_no_mount_has_none() -> None:
    """Memory of memfd_create is on a file system that is mounted nowhere."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        assert mount_of(os.fstat(fd).st_dev) is None
    finally:
        os.close(fd)
