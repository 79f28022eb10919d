"""Become the command that is given, which the kernel kills when the demo ends, however that comes about."""

import os
import sys

from kvleased.supervision.processes import die_with


def main() -> None:
    """Take the process id of the demo and the command; the kernel keeps its promise over the exec."""
    demo_pid, *command = sys.argv[1:]
    die_with(int(demo_pid))
    os.execv(command[0], command)  # noqa: S606 - the demo's own


if __name__ == "__main__":
    main()
