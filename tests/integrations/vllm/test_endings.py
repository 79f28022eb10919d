"""Prove that an engine ended or reset amid stores and loads leaves nothing wrong and nothing behind."""

import signal
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from tests.integrations.vllm.births import until
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import Job, Life, differences, living, prompt, reference
from tests.integrations.vllm.offloads import FOUND_MIN, PREFIX, PROMPTS, offloading

pytestmark = pytest.mark.vllm

TAILS: Final = [prompt(1100 + 33 * index, seed=80 + index, prefix=PREFIX) for index in range(4)]
"""Prompts whose first part is loaded, and whose rest is computed and stored."""
ARRIVALS: Final = [0, 1, 2, 3]
PIECES: Final = {"max_num_batched_tokens": 128, "max_num_seqs": 4}
"""An engine that loads, computes and stores for many steps."""
_STEP_WITHOUT_LOADS: Final = 12


def pausing(job: Job, step: int, life: Life) -> None:
    """Begin a round that loads and stores, and wait until it pauses behind a step."""
    life.begin(TAILS, arrivals=ARRIVALS, pause_at_step=step)
    assert life.paused() == step, job


def told(life: Life) -> str:
    """Return all that a life has logged."""
    return life.log.read_text(errors="replace")


def assert_nothing_is_left(daemon: Daemon) -> None:
    """Check that the daemon has no worker, lease, magazine or used block left, and that nothing failed.

    An engine that parts from a new daemon may do so before any of its processes has made the cache anew.
    """
    daemon.wait_until_unused()
    assert "Traceback" not in (daemon.folder / "daemon.log").read_text()
    caches = daemon.caches()
    assert len(caches) <= 1
    for cache, what in product(caches, ("workers", "leases", "magazines")):
        until(
            lambda cache=cache, what=what: daemon.listed(cache.cache, what).num_total == 0,
            f"{what} are left",
            60,
        )


def assert_next_life_is_right(daemon: Daemon, folder: Path) -> None:
    """Check that a life which loads without verification gets hits and gives the right answers."""
    job = offloading(daemon, engine=PIECES, verify=False)
    with living(job, folder) as life:
        got = life.generate(TAILS)

    assert min(got.cached) >= FOUND_MIN
    assert differences(got, reference(job, TAILS)) == []


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_shutdown_amid_stores_and_loads(is_async: bool, daemon: Daemon, tmp_path: Path) -> None:
    """A shutdown behind any step is immediate, publishes no half written block, and gives all blocks back."""
    job = offloading(daemon, engine=PIECES, is_async=is_async)
    with living(job, tmp_path) as life:
        life.generate(PROMPTS[:1])
    in_use = []
    for step in (1, 3):
        with living(job, tmp_path) as life:
            pausing(job, step, life)
            in_use.append(daemon.in_use())
        assert "Traceback" not in told(life)
        assert_nothing_is_left(daemon)

    assert min(in_use) > 0
    assert_next_life_is_right(daemon, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signal_amid_stores_and_loads(
    number: signal.Signals, daemon: Daemon, tmp_path: Path
) -> None:
    """A signal to all processes of an engine, as a terminal or service manager sends it, makes nothing of ours fail."""
    job = offloading(daemon, engine=PIECES, is_one_process=False)
    with living(job, tmp_path) as life:
        life.generate(PROMPTS[:1])
        pausing(job, 2, life)
        life.signal(number)

    assert "kvlease/integrations" not in told(life)
    assert_nothing_is_left(daemon)
    assert_next_life_is_right(daemon, tmp_path)


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_reset_amid_stores_and_loads(is_async: bool, daemon: Daemon, tmp_path: Path) -> None:
    """After a reset behind any step requests go on and are right; jobs from before it make nothing findable."""
    job = offloading(daemon, engine=PIECES, is_async=is_async)
    wanted = reference(job, TAILS)
    # vLLM takes blocks of running requests back only if no request waits for a load, and with a connector that loads
    # never between two steps scheduled ahead.
    steps = [(1, False), (3, False)] + [(_STEP_WITHOUT_LOADS, True)] * (not is_async)
    rounds = []
    with living(job, tmp_path) as life:
        life.generate(PROMPTS[:1])
    with living(job, tmp_path) as life:
        for step, with_running in steps:
            pausing(job, step, life)
            is_all = life.reset_prefix_cache(reset_running_requests=with_running)
            life.go_on()
            rounds.append(life.result())
            assert is_all == with_running
            assert life.reset_prefix_cache()
        rounds.append(life.generate(TAILS))

    assert rounds[-1].cached[0] == 0
    assert [differences(one, wanted) for one in rounds] == [[]] * (len(steps) + 1)
    assert "Traceback" not in told(life)
    assert_nothing_is_left(daemon)
    assert_next_life_is_right(daemon, tmp_path)


def test_requests_that_a_reset_preempts_load_again_at_once(daemon: Daemon, tmp_path: Path) -> None:
    """A reset that keeps the pool preempts requests, which load in the very step that tells of their preemption."""
    job = offloading(daemon, engine=PIECES)
    wanted = reference(job, TAILS)
    with living(job, tmp_path) as life:
        first = life.generate(TAILS)
        life.begin(TAILS, pause_at_step=_STEP_WITHOUT_LOADS)
        assert life.paused() == _STEP_WITHOUT_LOADS
        assert life.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
        life.go_on()
        again = life.result()

    assert [differences(one, wanted) for one in (first, again)] == [[], []]
    assert "Traceback" not in told(life)
    assert_nothing_is_left(daemon)


def test_reset_behind_windows_brings_no_other_request_to_light(
    daemon: Daemon, tmp_path: Path
) -> None:
    """Blocks behind a window, which may be another request's after a reset, are not stored again as this one's."""
    prefixes = [prompt(300, seed=1), prompt(300, seed=2)]
    lengths = [(100 + 37 * index % 200, 5 + 53 * index % 195) for index in range(40)]
    prompts = [
        prompt(before + behind, seed=100 + index, prefix=prefixes[index % 3 == 0][:before])
        for index, (before, behind) in enumerate(lengths)
    ]
    engine = {
        "num_gpu_blocks_override": 90,
        "max_model_len": 768,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
    }
    job = offloading(daemon, "hybrid", engine=engine)
    order = {"arrivals": [19 * index % 60 for index in range(40)]}
    wanted = reference(job, prompts)
    rounds = []
    with living(job, tmp_path) as life:
        rounds.append(life.generate(prompts, **order))
        for step in (30, 60):
            life.begin(prompts, pause_at_step=step, **order)
            life.paused()
            life.reset_prefix_cache()
            life.go_on()
            rounds.append(life.result())

    assert [differences(one, wanted) for one in rounds] == [[], [], []]
