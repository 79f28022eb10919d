"""Own a real Mooncake master of a test's own, out of the wheel; the test is skipped where that is not installed."""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.servers import debian
from tests.servers.processes import ServerProcess, answers, free_port


def environment() -> dict[str, str]:
    """Return what a process needs to load the library."""
    folders = [debian.library_path(debian.MOONCAKE), os.environ.get("LD_LIBRARY_PATH", "")]
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}


class MooncakeMaster(ServerProcess):
    """A master on loopback; its clients find each other without a metadata server."""

    def __init__(self, folder: Path) -> None:
        found = importlib.util.find_spec("mooncake")
        if found is None or found.origin is None:
            pytest.skip("kvlease[mooncake] is not installed")
        self.port = free_port()
        command = [str(Path(found.origin).with_name("mooncake_master")), "--rpc_address=127.0.0.1"]
        command += [f"--rpc_port={self.port}", "--metrics_host=127.0.0.1"]
        command += [f"--metrics_port={free_port()}", "--enable_metric_reporting=false"]
        super().__init__(command, folder, environment())
        self.come_up()

    def come_up(self) -> None:
        """Start it, also after it was killed."""
        self.start(lambda: answers(self.port))

    @property
    def url(self) -> str:
        """Where it is, and that its client brings some memory."""
        options = "segment_bytes=67108864&buffer_bytes=33554432&host=127.0.0.1"
        return f"mooncake://127.0.0.1:{self.port}?{options}"
