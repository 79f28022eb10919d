"""Own the question of which version of kvlease this is; the number itself comes from the installed package."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return the version of the installed package."""
    try:
        return version("kvlease")
    except PackageNotFoundError:  # run from a tree that was never installed
        return "unknown"
