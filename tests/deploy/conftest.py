"""Own the fixtures of deployment tests."""

import shutil
from collections.abc import Iterator

import pytest

from tests.deploy.containers.engine import Engine
from tests.deploy.containers.images import NAME, PLACE, Image, archived, build, forget
from tests.deploy.tools import Helm


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    """Start the real Helm SDK."""
    with Helm.running() as running:
        yield running


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    """Build the image for real."""
    assert shutil.which("buildah"), "tests/deploy/setup.sh installs it on Debian, as root"
    build("daemon", f"--tag={NAME}", "--build-arg=REVISION=of-the-tests")
    archive = PLACE / "daemon.tar"
    yield archived(NAME, archive)
    forget(NAME)
    archive.unlink()


@pytest.fixture(scope="session")
def engine(image: Image) -> Iterator[Engine]:
    """Give podman, with the image."""
    assert shutil.which("podman"), "tests/deploy/setup.sh installs it on Debian, as root"
    with Engine.running(image.archive) as running:
        yield running
