"""Which driver the tests of this folder run on: NVIDIA's own, or a stand-in over memory of the host."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("standin.c")


def built(directory: Path) -> Path:
    """Build the stand-in in a directory, which then is one to look for libraries in."""
    path = directory / "libcuda.so.1"
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    command = ["cc", *options, "-Wl,-soname,libcuda.so.1", "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True)
    return path


def why_none() -> str:
    """Say why the stand-in cannot be had here; empty where it can."""
    if importlib.util.find_spec("cuda") is None:
        return "kvlease[cuda] is not installed"
    return "" if shutil.which("cc") else "there is no C compiler"


def load(path: Path) -> None:
    """Have this process use the stand-in, whatever else there is: libraries are known by their names."""
    ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
