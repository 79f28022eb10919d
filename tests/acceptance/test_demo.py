"""Own the proof that the demo holds on this machine, and that a stranger sees why it would not."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.acceptance

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
DEMO_SECONDS_MAX = 600


def test_quick_demo_ends_with_status_0() -> None:
    """Two workers, an eviction and two kills later every token equals plain Transformers."""
    done = subprocess.run(
        [sys.executable, str(DEMO), "--quick"],
        capture_output=True,
        text=True,
        timeout=DEMO_SECONDS_MAX,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker killed, control process killed" in done.stdout
