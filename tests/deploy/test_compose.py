"""Laws of the shipped compose files, run for real by podman: their daemon becomes ready and is locked."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.containers.engine import Engine, status_of
from tests.deploy.containers.images import NAME
from tests.deploy.tools import ROOT, VENV, Helm, run

pytestmark = pytest.mark.deploy

_FILES: Final = ("deploy/compose.yaml", "examples/vllm/offload.yaml", "examples/vllm/shared.yaml")


@pytest.fixture(params=_FILES)
def daemon(
    request: pytest.FixtureRequest, engine: Engine, helm: Helm, tmp_path: Path
) -> Iterator[str]:
    """Run the daemon of each file with our image, without a network and with less memory."""
    # The engines and their common part are left out.
    text = (ROOT / request.param).read_text().replace("<<: *engine", "")
    (document,) = helm.load_yaml(text)
    service = document["services"]["kvleased"]
    for field in ("build", "networks"):
        service.pop(field, None)
    service |= {"image": NAME, "network_mode": "none", "mem_limit": "1g"}
    service["environment"] = {
        **service["environment"],
        "KVLEASED_MEMORY_BYTES_MAX": str(64 << 20),
        "KVLEASED_DEVICE_BYTES_DEFAULT": str(32 << 20),
    }
    volumes = {"sockets": document["volumes"]["sockets"]}
    options = volumes["sockets"]["driver_opts"]
    # This engine reads a volume's size as a quota of the disk below it, which supports none.
    options["o"] = options["o"].removeprefix("size=1m,")
    written = {"name": "composed", "services": {"kvleased": service}, "volumes": volumes}
    (tmp_path / "compose.yaml").write_text(json.dumps(written))
    compose = [
        VENV / "podman-compose",
        f"--podman-path={engine.wrapper}",
        "--in-pod=false",
        f"--file={tmp_path / 'compose.yaml'}",
    ]
    up = run(*compose, "up", "--detach", "--no-build")
    assert up.returncode == 0, up.stdout + up.stderr
    yield "composed_kvleased_1"
    run(*compose, "down", "--volumes", "--timeout=0")


def test_composed_daemon_is_ready_and_locked(engine: Engine, daemon: str) -> None:
    """The daemon has no capability, writes only to its tmpfs, and is ready by the file's own health command."""
    command = engine.inspect(daemon)["Config"]["Healthcheck"]["Test"]
    engine.until(
        daemon, lambda: engine.try_to("healthcheck", "run", daemon).returncode == 0 or None
    )

    assert "startupz" in " ".join(command)
    pid = engine.pid(daemon)
    status = status_of(pid)
    assert status["Uid"].split() == ["10001"] * 4
    assert {status[name] for name in status if name.startswith("Cap")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    mounts = {
        fields[4]: (fields[5].split(","), line.split(" - ")[1].split()[0])
        for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        for fields in [line.split()]
    }
    assert "ro" in mounts["/"][0]
    assert mounts["/run/kvlease"][1] == "tmpfs"
    sockets = Path(f"/proc/{pid}/root/run/kvlease").stat()
    assert (sockets.st_uid, stat.S_IMODE(sockets.st_mode)) == (10001, 0o700)
