"""The command line `kvlease`: what operators and the curious type."""

from kvlease.cli.app import main

__all__ = ["main"]
