"""Every test here runs twice: on a GPU (`make test-gpu`), and over a stand-in of the driver wherever there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlease.cuda import visible_devices
from kvlease.errors import InvalidError
from tests.acceptance.conftest import standing
from tests.gpu import driver

__all__ = ["standing"]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-in, and have this process use it."""
    if reason := driver.why_none():
        pytest.skip(reason)
    path = driver.built(tmp_path_factory.mktemp("driver"))
    driver.load(path)
    return path


# No longer than a module: tests elsewhere start daemons that are to look for no device.
@pytest.fixture(
    scope="module",
    autouse=True,
    params=[
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("stand-in", marks=pytest.mark.acceptance),
    ],
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name the device for `kvleased serve`, in whose environment it is, too."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gpu":
            try:
                visible_devices()
            except InvalidError as error:
                pytest.skip(str(error))
        else:
            library: Path = request.getfixturevalue("library")
            patch.setenv("LD_LIBRARY_PATH", str(library.parent))
            # Bindings may be newer than the driver that the stand-in plays; on a GPU their word counts.
            patch.setenv("CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING", "1")
        patch.setenv("KVLEASED_DEVICE", "cuda:0")
        yield "cuda:0"
