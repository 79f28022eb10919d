"""Own the daemons that tests share."""

from collections.abc import Iterator

import pytest

from tests.acceptance.serving import Serving
from tests.acceptance.standing import Standing


@pytest.fixture(scope="session")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """Give the daemons that no test is using, and start those that are missing."""
    with Standing(lambda: tmp_path_factory.mktemp("standing")) as standing:
        yield standing


@pytest.fixture(scope="module")
def daemon(standing: Standing) -> Iterator[Serving]:
    """Give a daemon without any cache to a module's tests, unless the module defines its own `daemon`."""
    with standing.lent() as serving:
        yield serving
