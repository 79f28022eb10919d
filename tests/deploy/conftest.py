"""Own the fixtures of what is deployed."""

from collections.abc import Iterator

import pytest

from tests.deploy.tools import Helm


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    """The real Helm SDK."""
    with Helm.running() as running:
        yield running
