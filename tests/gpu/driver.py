"""The driver of this folder's tests: NVIDIA's own, or a stand-in over host memory."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("standin.c")


def built(directory: Path) -> Path:
    """Build the stand-in in a directory, which can then be on the library path."""
    path = directory / "libcuda.so.1"
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    command = ["cc", *options, "-Wl,-soname,libcuda.so.1", "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True)
    return path


def why_none() -> str:
    """Return why the stand-in is unavailable here, or an empty string."""
    if importlib.util.find_spec("cuda") is None:
        return "kvlease[cuda] is not installed"
    return "" if shutil.which("cc") else "there is no C compiler"


def load(path: Path) -> None:
    """Load the stand-in into this process, which then uses it for every library of that name."""
    ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
