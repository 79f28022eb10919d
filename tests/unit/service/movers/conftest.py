"""Servers for one test module each, whose tests leave them as they were."""

from collections.abc import Iterator

import pytest

from tests.servers.redis import RedisServer


@pytest.fixture(scope="module")
def redis_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that no test kills."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis(redis_of_module: RedisServer) -> RedisServer:
    """A server without values."""
    with redis_of_module.client() as client:
        client.flushall()
    return redis_of_module
