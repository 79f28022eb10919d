"""Prove that an engine starts if its daemon dies or is full between its ranks' claim and its scheduler's attach."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvlease import FullAttention, PlanInputs
from tests.integrations.vllm.births import until
from tests.integrations.vllm.daemon import Daemon, serving
from tests.integrations.vllm.engine import Job, Life, differences, living, reference
from tests.integrations.vllm.jobs import HASTY_MS
from tests.integrations.vllm.starts import HELD_BY, shut_out, started
from tests.integrations.vllm.storms import families
from tests.integrations.vllm.test_owned import TINY, churn, job

pytestmark = pytest.mark.vllm

LAYER = FullAttention(name="another engine's", num_kv_heads=1, head_size=16, dtype="float32")
OTHERS = PlanInputs(layers=(LAYER,), tokens_per_block=16, device_blocks=4)
PROMPTS = families(6)
OTHER_PROMPTS = families(20)[6:]


def held(daemon: Daemon, folder: Path, **settings: object) -> Job:
    """Return an engine that waits between claim and attach."""
    return job(
        daemon,
        connector="tests.integrations.vllm.held.HeldConnector",
        engine=TINY,
        settings={"cache": "one", **settings},
        environment={HELD_BY: str(folder / "held")},
    )


def has_attached(daemon: Daemon) -> bool:
    """Return whether any worker has attached since the daemon's start; it may be gone again before anyone looks."""
    with daemon.client() as client:
        return any(event.kind == "worker_attached" for event in client.watch(idle_seconds=0.3))


def test_engine_starts_where_another_layout_has_its_name(daemon: Daemon, tmp_path: Path) -> None:
    """An engine whose cache's name has another layout after a restart goes on with the old memory, without a cache."""

    def give_away(life: Life) -> None:
        # A stopped rank cannot be the first to register the name.
        life.stop()
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            client.register("one", OTHERS)
        life.resume()

    with started(held(daemon, tmp_path), tmp_path, give_away) as life:
        assert churn(life, PROMPTS) == []
        told = life.told()

    assert "has lost the memory of this engine's cache" in told


def test_engine_publishes_nothing_of_memory_that_was_lost_at_its_start(
    daemon: Daemon, tmp_path: Path
) -> None:
    """If the ranks attach to new memory during the start, the next engine finds no unwritten block there."""

    def wipe(_: Life) -> None:
        daemon.kill()
        daemon.start()
        until(lambda: has_attached(daemon), "no rank attaches again")

    with started(held(daemon, tmp_path, retry_seconds=0.2), tmp_path, wipe) as life:
        assert churn(life, PROMPTS) == []
        assert churn(life, PROMPTS) == []
        told = life.told()
    daemon.wait_until_unused()

    owned = job(daemon, engine=TINY, settings={"cache": "one"})
    with living(owned, tmp_path) as life:
        got = life.generate(PROMPTS)
    assert differences(got, reference(owned, PROMPTS)) == []
    assert got.cached[0] == 0
    assert "has lost the memory of this engine's cache" in told


@pytest.mark.parametrize("what", ["refused", "frozen"])
def test_engine_whose_scheduler_is_not_let_in_serves(what: str, tmp_path: Path) -> None:
    """An engine without its scheduler's attach has the memory for itself, and cached blocks stay for the next life."""
    settings = {"start_seconds": 0.5, "deadline_ms": HASTY_MS}
    with serving(tmp_path, "--max-workers", "2") as daemon:
        with living(job(daemon, engine=TINY, settings={"cache": "one"}), tmp_path) as life:
            assert churn(life, PROMPTS) == []
            life.kill()
        daemon.wait_until_unused()

        with (
            ExitStack() as stack,
            started(
                held(daemon, tmp_path, **settings),
                tmp_path,
                lambda _: shut_out(daemon, what, stack),
            ) as life,
        ):
            assert [churn(life, OTHER_PROMPTS), churn(life, OTHER_PROMPTS)] == [[], []]
            told = life.told()
        daemon.wait_until_unused()

        owned = job(daemon, engine=TINY, settings={"cache": "one"})
        with living(owned, tmp_path) as life:
            got = life.generate(PROMPTS[-2:])

    assert min(got.cached) >= 64
    assert differences(got, reference(owned, PROMPTS[-2:])) == []
    assert "for itself" in told
