"""The shipped configurations, run by Prometheus: each finds its daemon, and no alert is about to fire."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.deploy.tools import ROOT
from tests.servers import debian

pytestmark = pytest.mark.deploy

FILES: Final = sorted((ROOT / "deploy" / "prometheus").glob("*.yml"))
_every = pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
ALONE: Final = Path(__file__).with_name("alone.py")


@_every
def test_every_target_of_a_configuration_answers(file: Path, tmp_path: Path) -> None:
    """With a daemon where the file expects one, each target is up, and no alert fires or is about to."""
    can = subprocess.run(["unshare", "-rmn", "ip", "link"], capture_output=True, check=False)
    if can.returncode:
        pytest.skip(f"no network of its own can be had: {can.stderr.decode().strip()}")
    folder = tmp_path / "prometheus"
    shutil.copytree(file.parent, folder)
    # The same configuration with shorter intervals.
    text = file.read_text().replace("15s", "1s\n  evaluation_interval: 1s").replace("10s", "1s")
    (folder / file.name).write_text(text)
    # With compose.yaml the daemon has another address than Prometheus, and a name.
    host = "127.0.0.1" if "local" in file.name else "127.0.0.2"
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.0.2 kvleased\n")

    found = _found(tmp_path, folder / file.name, host)

    assert {target["health"] for target in found["targets"]} == {"up"}
    assert found["alerts"] == []


def _found(folder: Path, config: Path, host: str) -> dict[str, Any]:
    prometheus = debian.program("prometheus", ("prometheus",))
    run = subprocess.run(
        ["unshare", "-rmn", sys.executable, ALONE, folder, prometheus, config, host],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    log = folder / "log"
    assert run.returncode == 0, run.stderr + (log.read_text() if log.exists() else "")
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@_every
def test_configuration_is_for_one_place(file: Path) -> None:
    """Each file has one job, kvlease, with one target, because a missing daemon would page for ever."""
    (job,) = yaml.safe_load(file.read_text())["scrape_configs"]

    assert job["job_name"] == "kvlease"
    assert [len(one["targets"]) for one in job["static_configs"]] == [1]
