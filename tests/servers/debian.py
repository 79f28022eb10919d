"""Own where programs and libraries come from that Debian has and Python's packages have not; no root is needed.

What the machine has is taken from there. All else is unpacked below the repository's build directory, once.
"""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

_BUILD = Path(__file__).parents[2] / "build"
_ROOT = _BUILD / "debian"
_SECONDS_MAX = 120
REDIS = ("redis-server", "redis-tools", "liblzf1", "libjemalloc2", "libatomic1")
MOONCAKE = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


def program(name: str, packages: tuple[str, ...]) -> str:
    """Return the path of a program; the test is skipped where it cannot be had."""
    return shutil.which(name) or str(_unpacked(packages) / "usr/bin" / name)


def library_path(packages: tuple[str, ...]) -> str:
    """Return what LD_LIBRARY_PATH must be for the libraries of some packages."""
    root = _unpacked(packages)
    folders = [*root.glob("usr/lib/*-linux-gnu*"), *root.glob("lib/*-linux-gnu*")]
    return os.pathsep.join(map(str, folders))


def _unpacked(packages: tuple[str, ...]) -> Path:
    """Return a directory with the files of some packages; tests side by side unpack them once."""
    target = _ROOT / packages[0]
    _ROOT.mkdir(parents=True, exist_ok=True)
    with (_ROOT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _unpack(packages, target)
    return target


def _unpack(packages: tuple[str, ...], target: Path) -> None:
    half = target.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    try:
        _download(packages, half)
        for package in half.glob("*.deb"):
            _run(["dpkg-deb", "-x", str(package), str(half)], half)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        lines = said.decode(errors="replace").strip().splitlines()
        pytest.skip(f"{packages[0]} is neither installed nor can it be downloaded: {lines[-1:]}")
    half.rename(target)


def _download(packages: tuple[str, ...], folder: Path) -> None:
    try:
        _run(["apt-get", "download", *packages], folder)
    except subprocess.CalledProcessError:
        # A fresh machine may have no lists yet; these are ours, which takes no root.
        own = folder / "apt"
        options = ["-o", f"Dir::State={own}/state", "-o", f"Dir::Cache={own}/cache"]
        (own / "state/lists/partial").mkdir(parents=True)
        (own / "cache/archives/partial").mkdir(parents=True)
        _run(["apt-get", *options, "update"], folder)
        _run(["apt-get", *options, "download", *packages], folder)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_SECONDS_MAX)
