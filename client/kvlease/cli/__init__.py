"""The command line `kvlease`: what operators and the curious type."""

from kvlease._interrupts import ended_at_once

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    with ended_at_once():
        from kvlease.cli.app import main as run  # noqa: PLC0415 - ^C during the import ends the process
    run()
