"""Every test here runs on a GPU (`make test-gpu`), and everywhere over a stand-in of the driver."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlease.errors import InvalidError
from kvlease.memory.cuda import visible_devices
from tests.acceptance.conftest import standing
from tests.gpu import driver

__all__ = ["standing"]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-in, and load it into this process."""
    if reason := driver.why_none():
        pytest.skip(reason)
    path = driver.built(tmp_path_factory.mktemp("driver"))
    driver.load(path)
    return path


# The scope is a module, because daemons of other tests must look for no device.
@pytest.fixture(
    scope="module",
    autouse=True,
    params=[
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("stand-in", marks=pytest.mark.acceptance),
    ],
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the device's name, which is also set in the environment of `kvleased serve`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gpu":
            try:
                visible_devices()
            except InvalidError as error:
                pytest.skip(str(error))
        else:
            library: Path = request.getfixturevalue("library")
            patch.setenv("LD_LIBRARY_PATH", str(library.parent))
            # The bindings may be newer than the stand-in's driver version; only on a GPU does their warning matter.
            patch.setenv("CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING", "1")
        patch.setenv("KVLEASED_DEVICE", "cuda:0")
        yield "cuda:0"
