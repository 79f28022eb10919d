"""Prove that an engine leaves a daemon that ends with its memory, in mid-life, and logs it consistently."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.vllm.births import until
from tests.integrations.vllm.daemon import Daemon, Traces
from tests.integrations.vllm.engine import Job, differences, living, reference
from tests.integrations.vllm.jobs import HASTY_MS
from tests.integrations.vllm.shares import sharing
from tests.integrations.vllm.storms import families
from tests.integrations.vllm.test_endings import assert_nothing_is_left
from tests.integrations.vllm.test_owned import TINY, job

pytestmark = pytest.mark.vllm

SETTINGS = {"retry_seconds": 0.2, "deadline_ms": HASTY_MS}
SESSIONS = 2
"""Sessions of an engine of one process: the scheduler's and the worker's."""
BEFORE, AMID, BEHIND = families(6), families(12), families(18)[6:]


def shared(daemon: Daemon) -> Job:
    """Return an engine that shares its pool with nobody yet."""
    return sharing(daemon, engine=TINY, extra=SETTINGS)


def owned(daemon: Daemon) -> Job:
    """Return an engine that has its pool for itself."""
    return job(daemon, engine=TINY, settings=SETTINGS)


@pytest.mark.parametrize(
    ("mode", "end"),
    [
        pytest.param(shared, "has all 39 blocks of its memory for itself", id="shared"),
        pytest.param(owned, "its cache now ends with the engine: restart the engine", id="owned"),
    ],
)
def test_engine_parts_in_mid_life(
    mode: Callable[[Daemon], Job], end: str, daemon: Daemon, tmp_path: Path
) -> None:
    """No token differs before, during or after the parting, nothing leaks, and the log's last line is true."""
    engine = mode(daemon)
    with living(engine, tmp_path) as life:
        said = [(life.generate(BEFORE), BEFORE)]
        traces = Traces(life.pid)
        life.begin(AMID, pause_at_step=12)
        life.paused()
        daemon.kill()
        daemon.start()
        life.go_on()
        said.append((life.result(), AMID))

        def has_parted() -> bool:
            said.append((life.generate(BEFORE), BEFORE))
            return end in life.told()

        until(has_parted, "it does not part")
        said += [(life.generate(BEHIND), BEHIND), (life.generate(BEHIND), BEHIND)]
        names, (descriptors,) = traces.new_names(), traces.new_descriptors()
        told = life.log.read_text()
    assert_nothing_is_left(daemon)

    assert [
        found for one in said if (found := differences(one[0], reference(engine, one[1])))
    ] == []
    assert sum(said[-1][0].cached) > 0
    assert names == set()
    assert descriptors < 0
    assert told.count("Attached to the kvlease daemon") == SESSIONS
    assert "attaching is tried again" not in told[told.index(end) :]
    assert "refuses" not in told
