"""Own which version of kvlease this is; the number itself is the installed package's."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return the version of the installed package."""
    try:
        return version("kvlease")
    except PackageNotFoundError:  # run from a tree that was never installed
        return "unknown"
