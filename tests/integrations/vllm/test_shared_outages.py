"""Prove that sharing hurts no engine when the daemon is away, loses its memory, or was never there."""

from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvlease import FullAttention, PlanInputs
from tests.integrations.vllm.births import until
from tests.integrations.vllm.daemon import Daemon, serving
from tests.integrations.vllm.engine import Life, differences, living, prompt, reference
from tests.integrations.vllm.jobs import HASTY_MS
from tests.integrations.vllm.shares import MANY, PROMPTS, TINY, sharing
from tests.integrations.vllm.starts import HELD_BY, shut_out, started

pytestmark = pytest.mark.vllm

LAYER = FullAttention(name="0", num_kv_heads=2, head_size=64, dtype="float32")
OTHER = PlanInputs(layers=(LAYER,), tokens_per_block=16, device_blocks=64)
"""A cache that no engine of these tests can use."""


@pytest.mark.parametrize("what", ["control killed", "frozen"])
def test_daemon_that_is_away_for_a_while(what: str, daemon: Daemon, tmp_path: Path) -> None:
    """Engines go on with their blocks while the daemon is away, and share again when it is back."""
    job = sharing(
        daemon,
        engine={**TINY, "num_gpu_blocks_override": 97},
        extra={"retry_seconds": 0.2, "deadline_ms": HASTY_MS},
    )
    wanted = reference(job, MANY)

    with living(job, tmp_path) as one, living(job, tmp_path) as two:
        for life in (one, two):
            life.begin(MANY, pause_at_step=10)
            life.paused()
        if what == "frozen":
            daemon.freeze()
        else:
            daemon.kill_control()
        one.go_on()
        two.go_on()
        if what == "frozen":
            until(
                lambda: "does not answer" in one.told() and "does not answer" in two.told(), "deaf"
            )
            daemon.thaw()
        first, second = one.result(), two.result()
        daemon.wait_until_ready()
        until(lambda: _finds(one, two), "they share no more")

    assert differences(first, wanted) == []
    assert differences(second, wanted) == []
    daemon.wait_until_unused()


def test_reset_outlives_a_publication_that_was_lost(daemon: Daemon, tmp_path: Path) -> None:
    """What was sent before a reset, and never carried out, is not published under the keys of after it."""
    job = sharing(daemon, extra={"retry_seconds": 0.2, "deadline_ms": HASTY_MS})
    fresh = [prompt(200, seed=next(_seeds))]

    with living(job, tmp_path) as life:
        daemon.freeze()
        life.generate(fresh)
        until(lambda: "does not answer" in life.told(), "deaf")
        assert life.reset_prefix_cache()
        daemon.kill_control()
        daemon.thaw()
        daemon.wait_until_ready()
        until(lambda: "answers again" in life.told(), "not back", 60)
        life.generate([prompt(200, seed=next(_seeds))])
        again = life.generate(fresh)

    assert again.cached == [0]


def _finds(one: Life, two: Life) -> bool:
    """Tell whether one engine finds what the other has just computed."""
    fresh = [prompt(200, seed=next(_seeds))]
    one.generate(fresh)
    return two.generate(fresh).cached[0] >= 160


_seeds = count(1000)
"""Seeds that give every try a new prompt."""


def test_daemon_wiped_under_an_engine(daemon: Daemon, tmp_path: Path) -> None:
    """An engine of a wiped daemon goes on with its old memory, and gives no wrong answer."""
    job = sharing(daemon, extra={"retry_seconds": 0.2, "deadline_ms": HASTY_MS})
    wanted = reference(job, PROMPTS)

    with living(job, tmp_path) as life:
        life.begin(PROMPTS, pause_at_step=6)
        life.paused()
        daemon.kill()
        daemon.start()
        life.go_on()
        first = life.result()
        second = life.generate(PROMPTS[:1])

    assert differences(first, wanted) == []
    assert differences(second, replace(wanted, requests=wanted.requests[:1])) == []


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_engines_of_a_wiped_daemon_have_room_for_all(
    model: str, daemon: Daemon, tmp_path: Path
) -> None:
    """Each engine goes on as if alone in the old memory; neither sees what the other writes there."""
    engine = TINY if model == "llama" else TINY | {"max_model_len": 480}
    job = sharing(
        daemon, model=model, engine=engine, extra={"retry_seconds": 0.2, "deadline_ms": HASTY_MS}
    )
    wanted = reference(job, MANY)

    with living(job, tmp_path) as one, living(job, tmp_path) as two:
        for life in (one, two):
            life.begin(MANY, pause_at_step=6)
            life.paused()
        daemon.kill()
        daemon.start()
        one.go_on()
        two.go_on()
        said = [one.result(), two.result()]
        for life in (one, two):
            life.begin(MANY)
        said += [one.result(), two.result()]
        with living(job, tmp_path) as heir, living(job, tmp_path) as other:
            said += [heir.generate(MANY), other.generate(MANY), two.generate(MANY)]

    assert [differences(got, wanted) for got in said] == [[]] * 7
    assert "An error of kvlease" not in one.told() + two.told()
    daemon.wait_until_unused()


def test_wiped_daemon_that_is_given_another_cache_of_the_name(
    daemon: Daemon, tmp_path: Path
) -> None:
    """If the new daemon's cache of that name differs, the engine has all of its old memory for itself."""
    extra = {"retry_seconds": 2, "deadline_ms": HASTY_MS, "cache": "ours"}
    job = sharing(daemon, engine=TINY, extra=extra)
    wanted = reference(job, MANY)

    with living(job, tmp_path) as one:
        one.begin(MANY, pause_at_step=6)
        one.paused()
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            client.register("ours", OTHER)
        one.go_on()
        said = [one.result(), one.generate(MANY)]

    assert [differences(got, wanted) for got in said] == [[], []]
    assert "for itself" in one.told()


def test_daemon_absent_at_start(daemon: Daemon, tmp_path: Path) -> None:
    """An engine without a daemon at its start runs on memory of its own."""
    daemon.stop()
    job = sharing(daemon, extra={"start_seconds": 0.2, "deadline_ms": HASTY_MS})

    with living(job, tmp_path) as life:
        got = life.generate(PROMPTS)
        daemon.start()

    assert differences(got, reference(job, PROMPTS)) == []


@pytest.mark.parametrize("what", ["refused", "frozen"])
def test_engine_whose_scheduler_is_not_let_in_serves(what: str, tmp_path: Path) -> None:
    """An engine without its scheduler's attach has the memory for itself, and leaves cached blocks as they were."""
    with serving(tmp_path, "--max-workers", "2") as daemon:
        extra = {"start_seconds": 0.5, "deadline_ms": HASTY_MS, "cache": "ours"}
        held = sharing(
            daemon,
            engine=TINY,
            extra=extra,
            connector="tests.integrations.vllm.held.HeldSharedConnector",
            environment={HELD_BY: str(tmp_path / "held")},
        )
        job = sharing(daemon, engine=TINY, extra={"cache": "ours"})
        with living(job, tmp_path) as life:
            said = [life.generate(PROMPTS)]
        daemon.wait_until_unused()

        with (
            ExitStack() as stack,
            started(held, tmp_path, lambda _: shut_out(daemon, what, stack)) as life,
        ):
            others = [life.generate(MANY), life.generate(MANY)]
            told = life.told()
        daemon.wait_until_unused()

        with living(job, tmp_path) as life:
            said.append(life.generate(PROMPTS))

    assert [differences(got, reference(job, PROMPTS)) for got in said] == [[], []]
    assert [differences(got, reference(job, MANY)) for got in others] == [[], []]
    assert min(said[-1].cached) >= 320
    assert "for itself" in told
