"""Own the proof that the demo holds on this machine, and that a stranger sees why it would not."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.acceptance

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
DEMO_SECONDS_MAX = 600
START_SECONDS_MAX = 120
NUM_CHILDREN = 4
POLL_SECONDS = 0.05


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


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_demo_that_is_told_to_end_leaves_no_process(ending: signal.Signals) -> None:
    """Whoever stops it, or closes its terminal, gets the daemon's memory back at once."""
    with subprocess.Popen([sys.executable, str(DEMO), "--quick"], stderr=subprocess.PIPE) as demo:
        children = _children_of(demo)

        demo.send_signal(ending)

        assert demo.communicate(timeout=START_SECONDS_MAX)[1].endswith(
            b"its processes have ended\n"
        )
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def _children_of(demo: subprocess.Popen[bytes]) -> list[int]:
    """Wait until the demo has started reference, daemon and two workers; return their process ids."""
    listed = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
    deadline = time.monotonic() + START_SECONDS_MAX
    while len(children := listed.read_text().split()) < NUM_CHILDREN:
        assert time.monotonic() < deadline, children
        time.sleep(POLL_SECONDS)
    return [int(pid) for pid in children]
