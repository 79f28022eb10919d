"""The protocol keeps its rules, and programs built against the last release are still understood.

`protocol/released.binpb` is the protocol of the last release, made by
`buf build --exclude-source-info -o tests/deploy/protocol/released.binpb client/kvlease/proto` when there is one.
"""

import subprocess
from pathlib import Path

import pytest

from tests.deploy.tools import ROOT

pytestmark = pytest.mark.deploy

BUF = ROOT / "build" / "buf" / "node_modules" / ".bin" / "buf"
PROTO = ROOT / "client" / "kvlease" / "proto"
RELEASED = Path(__file__).with_name("protocol") / "released.binpb"


def buf(*arguments: str, cwd: Path = PROTO) -> str:
    """Run buf over the protocol; return its complaints, or an empty string."""
    assert BUF.exists(), "run make test-deploy, which installs what this needs"
    run = subprocess.run(
        [BUF, *arguments], check=False, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    return run.stdout + run.stderr


def test_protocol_is_well_written() -> None:
    """Names, comments and numbers follow the rules of buf.yaml."""
    assert buf("lint") == ""


def test_nothing_that_was_released_breaks() -> None:
    """No field, method or number of the last release is gone or means something else."""
    assert buf("breaking", "--against", str(RELEASED)) == ""


def test_a_break_is_found(tmp_path: Path) -> None:
    """The comparison finds a field whose number has changed."""
    (tmp_path / "kvlease" / "v1").mkdir(parents=True)
    (tmp_path / "buf.yaml").write_text((PROTO / "buf.yaml").read_text())
    text = (PROTO / "kvlease" / "v1" / "kvlease.proto").read_text()
    assert "string request_id = 1;" in text
    changed = text.replace("string request_id = 1;", "string request_id = 901;", 1)
    (tmp_path / "kvlease" / "v1" / "kvlease.proto").write_text(changed)

    assert "request_id" in buf("breaking", "--against", str(RELEASED), cwd=tmp_path)
