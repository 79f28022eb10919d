"""Laws of what the environment tells gRPC."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvleased.api.grpc import environment as grpc_environment

_SERVE = """
import asyncio, sys
from kvleased.api.grpc import environment as grpc_environment
grpc_environment.prepare()
import grpc

async def serve():
    server = grpc.aio.server()
    server.add_insecure_port(f"unix:{sys.argv[1]}")
    await server.start()
    await server.stop(None)

asyncio.run(serve())
"""


def test_grpc_knows_what_it_is_told(tmp_path: Path) -> None:
    """Every experiment that is named is known to the installed gRPC, which would complain otherwise."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}

    served = subprocess.run(
        [sys.executable, "-c", _SERVE, str(tmp_path / "sock")],
        env=bare,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert "experiment" not in served.stderr


def test_operators_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that an operator has set stays as it is."""
    for name in grpc_environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")

    grpc_environment.prepare()

    assert os.environ["GRPC_VERBOSITY"] == "DEBUG"
    assert os.environ["GRPC_EXPERIMENTS"] == grpc_environment.VARIABLES["GRPC_EXPERIMENTS"]
