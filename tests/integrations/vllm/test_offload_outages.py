"""Prove that offloading hurts no engine while the daemon is away or blocks are spoiled."""

from pathlib import Path

import pytest

from tests.integrations.vllm.births import until
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import (
    contrasts,
    differences,
    living,
    prompt,
    reference,
)
from tests.integrations.vllm.jobs import HASTY_MS
from tests.integrations.vllm.offloads import (
    MODELS,
    PROMPTS,
    TINY,
    loaded_tokens,
    num_found,
    offloading,
    part,
)

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "control killed"])
def test_requests_go_on_while_the_daemon_is_away(
    is_frozen: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """An engine whose daemon does not answer gives right answers, and stores again when it does."""
    job = offloading(daemon, retry_seconds=0.2, deadline_ms=HASTY_MS)
    fresh = [prompt(1040, seed=70 + index) for index in range(2)]
    with living(job, tmp_path) as life:
        life.begin(PROMPTS, pause_at_step=2)
        life.paused()
        if is_frozen:
            daemon.freeze()
        else:
            daemon.kill_control()
        life.go_on()
        away = life.result()
        alone = life.generate(fresh)
        if is_frozen:
            daemon.thaw()
        daemon.wait_until_ready()
        stored = num_found(daemon)
        others = iter(range(100, 1 << 30))
        until(
            lambda: (
                life.generate([prompt(1040, seed=next(others))]) is not None
                and num_found(daemon) > stored
            ),
            "the engine stores no more",
        )

    assert differences(away, reference(job, PROMPTS)) == []
    assert differences(alone, reference(job, fresh)) == []


def test_requests_go_on_while_the_daemon_dies_and_returns(daemon: Daemon, tmp_path: Path) -> None:
    """An engine whose daemon is killed gives right answers, and uses the next daemon by itself."""
    job = offloading(daemon, engine=TINY, retry_seconds=0.2, deadline_ms=HASTY_MS)
    wanted = reference(job, PROMPTS)
    with living(job, tmp_path) as life:
        life.generate(PROMPTS)
        life.begin(PROMPTS, pause_at_step=2)
        life.paused()
        daemon.kill()
        life.go_on()
        killed = life.result()
        daemon.start()
        until(lambda: bool(daemon.caches()), "the engine does not attach again")
        until(
            lambda: life.generate(PROMPTS[:1]) is not None and num_found(daemon) > 0,
            "the engine stores nothing in the new pool",
        )
        back = life.generate(PROMPTS)

    assert differences(killed, wanted) == []
    assert differences(back, wanted) == []


def test_engine_without_daemon_runs_and_uses_one_that_comes(daemon: Daemon, tmp_path: Path) -> None:
    """An engine without a daemon runs without a cache, and by itself uses a daemon that comes later."""
    daemon.stop()
    job = offloading(daemon, start_seconds=0.2, retry_seconds=0.2, deadline_ms=HASTY_MS)

    with living(job, tmp_path) as life:
        got = life.generate(PROMPTS[:2])
        assert loaded_tokens(life) == 0
        daemon.start()
        until(lambda: bool(daemon.caches()), "the engine does not attach")
        others = iter(range(100, 1 << 30))
        until(
            lambda: (
                life.generate([prompt(1040, seed=next(others))]) is not None
                and num_found(daemon) > 0
            ),
            "the engine stores nothing",
        )

    assert differences(got, part(reference(job, PROMPTS), 0, 2)) == []


@pytest.mark.parametrize("model", MODELS)
def test_loads_of_spoiled_blocks_degrade_to_misses(
    model: str, daemon: Daemon, tmp_path: Path
) -> None:
    """Requests whose loads fail, in one group or several, compute instead, and give right answers."""
    job = offloading(daemon, model)
    wanted = reference(job, PROMPTS)
    with living(job, tmp_path) as life:
        life.generate(PROMPTS)
    stored = num_found(daemon)
    daemon.spoil()

    with living(job, tmp_path) as life:
        got = life.generate(PROMPTS)
        again = life.generate(PROMPTS)
        assert loaded_tokens(life) > 0

    assert stored > 0
    assert differences(got, wanted) == []
    assert differences(again, wanted) == []
    assert [one.finish_reason for one in got.requests] == ["length"] * len(PROMPTS)


@pytest.mark.parametrize("model", MODELS)
def test_unverified_loads_of_spoiled_blocks_differ(
    model: str, daemon: Daemon, tmp_path: Path
) -> None:
    """Loaded bytes are really used: without verification, random bytes change the answers."""
    job = offloading(daemon, model, verify=False)
    wanted = reference(job, PROMPTS)
    with living(job, tmp_path) as life:
        life.generate(PROMPTS)
    daemon.spoil()

    with living(job, tmp_path) as life:
        got = life.generate(PROMPTS)

    assert len(contrasts(got, wanted)) == len(PROMPTS)
