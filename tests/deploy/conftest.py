"""Own the fixtures of what is deployed."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.containers.engine import Engine
from tests.deploy.containers.images import NAME, PLACE, Image, archived, build, forget
from tests.deploy.tools import Helm

_HERE: Final = Path(__file__).parent
_OF_THE_IMAGE: Final = {"test_compose", "test_image", "test_pod", "test_systemd"}
"""Files whose tests share the image and its engine: one of pytest's processes has them all, and begins with them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep files whole, as what a file shares is started for it; what takes longest, mostly waiting, comes first."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            name = item.path.stem
            group = "image" if name in _OF_THE_IMAGE else name
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.path.stem not in _OF_THE_IMAGE)


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    """The real Helm SDK."""
    with Helm.running() as running:
        yield running


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    """The image, built for real."""
    assert shutil.which("buildah"), "tests/deploy/setup.sh installs it on Debian, as root"
    build("daemon", f"--tag={NAME}", "--build-arg=REVISION=of-the-tests")
    archive = PLACE / "daemon.tar"
    yield archived(NAME, archive)
    forget(NAME)
    archive.unlink()


@pytest.fixture(scope="session")
def engine(image: Image) -> Iterator[Engine]:
    """Podman, which has the image."""
    assert shutil.which("podman"), "tests/deploy/setup.sh installs it on Debian, as root"
    with Engine.running(image.archive) as running:
        yield running
