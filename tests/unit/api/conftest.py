"""The three servers over a scripted daemon, in one event loop."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvleased.api.grpc.server import GrpcServer
from kvleased.api.local.listener import LocalServer
from kvleased.api.rest.server import RestServer
from kvleased.config.settings import Settings
from kvleased.metrics import Metrics
from tests.unit.api.scripted import ScriptedDaemon, Served


@pytest.fixture
def settings() -> Iterator[Settings]:
    """Settings with a directory of their own and any free ports."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        yield Settings(
            runtime_dir=Path(directory) / "run",
            http_port=0,
            grpc_port=0,
            max_message_bytes=65536,
            max_calls_in_flight=4,
        )


@pytest.fixture
async def served(settings: Settings, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """The servers over a scripted daemon; only those in the module's TRANSPORTS are started."""
    daemon = ScriptedDaemon()
    metrics = Metrics()
    servers = {
        "local": LocalServer(metrics), "rest": RestServer(metrics), "grpc": GrpcServer(metrics),
    }  # fmt: skip
    started = [servers[name] for name in getattr(request.module, "TRANSPORTS", servers)]
    for server in started:
        await server.start(daemon, settings)
    scene = Served(daemon, settings, *servers.values(), metrics)
    yield scene
    for line in scene.lines:
        line.writer.close()
        await line.writer.wait_closed()
    for server in started:
        await server.stop()
