"""Own the daemons that tests share."""

from collections.abc import Iterator

import pytest

from tests.acceptance.standing import Standing


@pytest.fixture(scope="session")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """Give the daemons that no test has, and start those that are missed."""
    with Standing(lambda: tmp_path_factory.mktemp("standing")) as standing:
        yield standing
