"""Prove that the demo works on this machine, leaves no process, and says why it cannot run."""

import os
import select
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
END_SECONDS_MAX = 15
"""Seconds; a child that is not told to end lives longer: the reference for a while, the daemon without end."""
NUM_CHILDREN = 4
"""Children of the demo: the reference, the daemon and two workers."""
NUM_CHILDREN_OF_DAEMON = 2
POLL_SECONDS = 0.05


@pytest.mark.thorough
def test_quick_demo_ends_with_status_0() -> None:
    """After two workers, an eviction and two kills, every token equals that of plain Transformers."""
    done = subprocess.run(
        [sys.executable, str(DEMO), "--quick"],
        capture_output=True,
        text=True,
        timeout=DEMO_SECONDS_MAX,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker killed, control process killed" in done.stdout


def test_demo_says_at_once_what_it_does() -> None:
    """The first lines come before the daemon is there and the workers have imported torch, which takes long."""
    with subprocess.Popen(
        [sys.executable, str(DEMO), "--quick"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as demo:
        assert demo.stdout is not None
        told = [demo.stdout.readline() for _ in range(2)]
        demo.terminate()

    assert told[0].startswith(b"the demo starts")
    assert b"starting the daemon" in told[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "ending", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.thorough)]
)
def test_demo_that_is_told_to_end_leaves_no_process(ending: signal.Signals) -> None:
    """When the demo is stopped, or its terminal closed, the daemon's memory is freed at once."""
    with subprocess.Popen([sys.executable, str(DEMO), "--quick"], stderr=subprocess.PIPE) as demo:
        children = _children_of(demo.pid, NUM_CHILDREN)

        demo.send_signal(ending)

        assert demo.communicate(timeout=START_SECONDS_MAX)[1].endswith(
            b"its processes have ended\n"
        )
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_demo_that_is_killed_leaves_no_process() -> None:
    """SIGKILL ends only the demo itself; its daemon and workers then end by themselves."""
    with subprocess.Popen([sys.executable, str(DEMO), "--quick"], stderr=subprocess.PIPE) as demo:
        children = _children_of(demo.pid, NUM_CHILDREN)
        (daemon,) = (pid for pid in children if _is_daemon(pid))
        pidfds = [
            os.pidfd_open(pid) for pid in (*children, *_children_of(daemon, NUM_CHILDREN_OF_DAEMON))
        ]

        demo.kill()

        assert all(_ends(pidfd) for pidfd in pidfds)
    for pidfd in pidfds:
        os.close(pidfd)


def _ends(pidfd: int) -> bool:
    """Wait until a process has ended, whether or not its parent has reaped it; return whether it did."""
    return bool(select.select([pidfd], [], [], END_SECONDS_MAX)[0])


def _children_of(parent: int, num_children: int) -> list[int]:
    """Wait until a process has started all of its children; return their process ids."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while len(children := _children(parent)) < num_children:
        assert time.monotonic() < deadline, children
        time.sleep(POLL_SECONDS)
    return children


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def _is_daemon(pid: int) -> bool:
    return b"kvleased\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
