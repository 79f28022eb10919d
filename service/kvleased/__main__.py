"""Own the start of `kvleased`; what the command line does is `command_line`'s business."""

from typing import NoReturn

from kvlease._interrupts import ended_at_once


def main() -> NoReturn:
    """Run `kvleased` and exit with its status."""
    with ended_at_once():
        from kvleased.command_line import main as run  # noqa: PLC0415 - ^C during the import ends the process
    run()


if __name__ == "__main__":
    main()
