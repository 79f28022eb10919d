"""Prove that an engine whose cache is the daemon's memory is right, and warm after any end of its life."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.births import until
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import (
    Job,
    Life,
    beside_offload,
    contrasts,
    differences,
    living,
    prompt,
    reference,
)
from tests.integrations.vllm.jobs import PATIENT_MS
from tests.integrations.vllm.storms import chance_of, families, storm

pytestmark = pytest.mark.vllm

PREFIX = prompt(1000, seed=99)
LONG = [prompt(1010 + 7 * index, seed=index, prefix=PREFIX) for index in range(2)]
TINY = {
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 40,
}
"""A pool that fits few requests, and small steps, of which a prompt takes several."""
CALLS_IN_ADVANCE_MAX = 12
"""Calls of each life to begin and to end, beyond one for each step."""


def job(
    daemon: Daemon, *, connector: str = "", settings: dict[str, Any] | None = None, **words: Any
) -> Job:
    """Return an engine whose cache is the daemon's memory."""
    module, _, name = connector.rpartition(".")
    transfer = {
        "kv_connector": name or "KVLeaseOwnedConnector",
        "kv_connector_module_path": module or "kvlease.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "socket": daemon.address,
            "deadline_ms": PATIENT_MS,
            **(settings or {}),
        },
    }
    engine = {
        "kv_cache_memory_bytes": 16 << 20,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        **words.pop("engine", {}),
    }
    return Job(engine=engine, kv_transfer_config=transfer, **words)


def churn(life: Life, prompts: Sequence[Sequence[int]], **order: Any) -> list[str]:
    """Run prompts, of which one arrives each step; return the differences from answers without a cache."""
    got = life.generate(prompts, arrivals=list(range(len(prompts))), **order)
    return differences(got, reference(life.job, prompts))


# A warm restart ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_engine_killed_and_started_again_is_warm(
    model: str, daemon: Daemon, tmp_path: Path
) -> None:
    """After SIGKILL all but the end of a prefix is there as the engine's own blocks; the daemon copied none."""
    owned = job(daemon, model=model, engine={"kv_cache_memory_bytes": 32 << 20})
    wanted = reference(owned, LONG)
    copied_before = daemon.bytes_copied()
    with living(owned, tmp_path) as life:
        first = life.generate(LONG)
        life.kill()
    # A claim before the death is proven would be repeated and counted.
    daemon.wait_until_unused()

    with living(owned, tmp_path) as life:
        got = life.generate(LONG)
        metrics = life.metrics("vllm:external_prefix_cache_hits", "vllm:prefix_cache_hits")

    assert [differences(one, wanted) for one in (first, got)] == [[], []]
    assert min(got.cached) >= 0.95 * len(PREFIX)
    assert daemon.exchanges() <= first.steps + got.steps + 2 * CALLS_IN_ADVANCE_MAX
    assert metrics["vllm:external_prefix_cache_hits"] == 0
    assert metrics["vllm:prefix_cache_hits"] == sum(got.cached)
    assert daemon.bytes_copied() == copied_before
    daemon.wait_until_unused()


def test_engine_ended_in_good_order_leaves_everything(daemon: Daemon, tmp_path: Path) -> None:
    """After an orderly end generated blocks are found, too, up to the last full one."""
    owned = job(daemon, sampling={"max_tokens": 40})
    with living(owned, tmp_path) as life:
        said = life.generate(LONG[:1]).requests[0].tokens
    longer = [[*LONG[0], *said, 7]]

    with living(owned, tmp_path) as life:
        got = life.generate(longer)

    assert got.cached[0] >= len(longer[0]) - 2 * 32
    assert differences(got, reference(owned, longer)) == []


def test_pool_of_random_bytes_gives_other_tokens(daemon: Daemon, tmp_path: Path) -> None:
    """The second life really reads the daemon's memory: random bytes change its tokens."""
    owned = job(daemon)
    with living(owned, tmp_path) as life:
        life.generate(LONG)
        life.kill()
    daemon.wait_until_unused()
    daemon.spoil()

    with living(owned, tmp_path) as life:
        got = life.generate(LONG)

    assert len(contrasts(got, reference(owned, LONG))) == len(LONG)


# The fence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("connector", "is_async", "is_right"),
    [
        pytest.param("", False, True, id="fenced"),
        pytest.param("", True, True, id="fenced-async"),
        pytest.param("tests.integrations.vllm.naive.HastyConnector", False, False, id="hasty"),
    ],
)
def test_life_that_dies_before_a_forward_leaves_no_unwritten_block(
    connector: str, is_async: bool, is_right: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """Blocks are published after the step that writes them; if published before, the next life's tokens differ."""
    owned = job(daemon, connector=connector, engine=TINY, is_async=is_async)
    prompts = families(4)
    with living(owned, tmp_path) as life:
        life.begin(prompts, die_before_forward=1)
        assert life.wait() == -9

    with living(owned, tmp_path) as life:
        got = life.generate(prompts)

    compared = differences if is_right else contrasts
    assert (compared(got, reference(owned, prompts)) == []) is is_right


@pytest.mark.parametrize(
    ("connector", "is_right"),
    [
        pytest.param("", True, id="fenced"),
        pytest.param("tests.integrations.vllm.naive.CarelessConnector", False, id="careless"),
    ],
)
def test_life_that_dies_amid_eviction_leaves_no_overwritten_block(
    connector: str, is_right: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """Blocks are retracted before they are overwritten; if not, the next life's tokens differ."""
    owned = job(daemon, connector=connector, engine=TINY)
    old, new = families(4), [prompt(480, seed=700 + at) for at in range(3)]
    with living(owned, tmp_path) as life:
        life.generate(old)
        life.begin(new, die_before_forward=9)
        assert life.wait() == -9

    with living(owned, tmp_path) as life:
        got = life.generate(old)

    compared = differences if is_right else contrasts
    assert (compared(got, reference(owned, old)) == []) is is_right


@pytest.mark.parametrize(
    ("model", "is_async"),
    [("llama", False), ("llama", True), ("hybrid", False)],
    ids=["llama", "llama-async", "hybrid"],
)
def test_lives_killed_amid_churn_say_what_they_say_without_a_cache(
    model: str, is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """With hits, evictions, preemptions, chunked prefill and death at any step, no token differs."""
    blocks = 100 if model == "hybrid" else 40
    engine = {**TINY, "num_gpu_blocks_override": blocks}
    owned = job(daemon, model=model, engine=engine, is_async=is_async)
    prompts = families(14)
    chance = chance_of(f"{model} {is_async}")
    cached = 0
    for _ in range(3):
        with living(owned, tmp_path) as life:
            got = life.generate(prompts, arrivals=list(range(len(prompts))))
            assert differences(got, reference(owned, prompts)) == []
            cached += sum(got.cached)
            shuffled = chance.sample(prompts, len(prompts))
            life.begin(shuffled, die_before_forward=chance.randrange(2, 30))
            assert life.wait() == -9

    assert cached > 0
    daemon.wait_until_unused()


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_abort_storm_changes_no_token(is_async: bool, daemon: Daemon, tmp_path: Path) -> None:
    """Requests aborted while they wait, are prefilled or generate harm no other request, and leave no block behind."""
    owned = job(daemon, engine=TINY, is_async=is_async)

    with living(owned, tmp_path) as life:
        found, num_aborted = storm(life, 42, seed=int(is_async))

    assert found == []
    assert num_aborted > 8
    daemon.wait_until_unused()


def test_two_ranks_are_warm_after_a_kill(daemon: Daemon, tmp_path: Path) -> None:
    """After a kill each of two ranks finds its own part of the blocks."""
    owned = job(daemon, engine={"tensor_parallel_size": 2})
    alone = job(daemon)
    wanted = reference(alone, LONG)
    with living(owned, tmp_path) as life:
        life.generate(LONG)
        life.kill()

    with living(owned, tmp_path) as life:
        got = life.generate(LONG)

    assert min(got.cached) >= 0.95 * len(PREFIX)
    assert differences(got, wanted) == []


# The daemon -------------------------------------------------------------------------------------------------------


def test_engine_starts_without_a_daemon(daemon: Daemon, tmp_path: Path) -> None:
    """Without a daemon the engine works on memory of its own."""
    daemon.kill()
    owned = job(daemon, engine=TINY, settings={"start_seconds": 0.5})

    with living(owned, tmp_path) as life:
        found = churn(life, families(6))

    daemon.start()
    assert found == []


def test_engine_goes_on_while_the_daemon_stands_still(daemon: Daemon, tmp_path: Path) -> None:
    """Meanwhile no findable block is overwritten; afterwards the engine's blocks persist as before."""
    owned = job(daemon, engine=TINY)
    prompts = families(14)
    with living(owned, tmp_path) as life:
        life.begin(prompts, arrivals=list(range(14)), pause_at_step=10)
        life.paused()
        daemon.freeze()
        life.go_on()
        assert differences(life.result(), reference(owned, prompts)) == []
        life.kill()
    daemon.thaw()

    with living(owned, tmp_path) as life:
        assert churn(life, prompts) == []
        life.begin(prompts, pause_at_step=5)
        life.paused()
        daemon.freeze()
        life.go_on()
        life.result()
        daemon.thaw()
        daemon.wait_until_ready()
        before = daemon.exchanges()
        until(lambda: churn(life, prompts[-2:]) == [] and daemon.exchanges() > before, "no peace")
        assert churn(life, prompts) == []
        assert churn(life, prompts[-2:]) == []
        life.kill()

    with living(owned, tmp_path) as life:
        got = life.generate(prompts[-2:])
    assert min(got.cached) >= 64
    assert differences(got, reference(owned, prompts[-2:])) == []


@pytest.mark.parametrize("is_wiped", [False, True], ids=["control", "all"])
def test_engine_outlives_the_daemon(is_wiped: bool, daemon: Daemon, tmp_path: Path) -> None:
    """Nothing fails or differs; if the memory is gone, blocks persist again after the engine's own restart."""
    owned = job(daemon, engine=TINY)
    prompts = families(14)
    with living(owned, tmp_path) as life:
        life.begin(prompts, arrivals=list(range(14)), pause_at_step=10)
        life.paused()
        if is_wiped:
            daemon.kill()
        else:
            daemon.kill_control()
        life.go_on()
        assert differences(life.result(), reference(owned, prompts)) == []
        if is_wiped:
            daemon.start()
        daemon.wait_until_ready()
        assert churn(life, prompts) == []
        if not is_wiped:
            until(lambda: churn(life, prompts[-2:]) == [] and daemon.exchanges() > 0, "no peace")
            assert churn(life, prompts[-2:]) == []
        life.kill()

    with living(owned, tmp_path) as life:
        got = life.generate(prompts[-2:])
        again = life.generate(prompts[-2:])
    assert (min(got.cached) >= 64) is not is_wiped
    assert min(again.cached) >= 64
    assert differences(got, reference(owned, prompts[-2:])) == []


# Refusals ---------------------------------------------------------------------------------------------------------


def test_another_layout_is_refused_and_named(daemon: Daemon, tmp_path: Path) -> None:
    """An engine whose pool differs runs on memory of its own, and its log names the number that differs."""
    settings = {"cache": "one", "start_seconds": 0.5}
    with living(job(daemon, engine=TINY, settings=settings), tmp_path) as life:
        life.generate(families(2))
    other = job(daemon, engine={**TINY, "num_gpu_blocks_override": 41}, settings=settings)

    with living(other, tmp_path) as life:
        assert churn(life, families(2)) == []
        told = life.told()

    assert "num_blocks" in told
    assert "its cache ends with the engine" in told


def test_pool_has_one_engine_at_a_time(daemon: Daemon, tmp_path: Path) -> None:
    """A second engine runs on memory of its own, and the first engine's next life finds its cache unchanged."""
    owned = job(daemon, settings={"start_seconds": 0.5})
    wanted = reference(owned, LONG)
    with living(owned, tmp_path) as first:
        first.generate(LONG)
        with living(owned, tmp_path) as second:
            beside = second.generate(LONG)
            told = second.told()
        first.kill()

    with living(owned, tmp_path) as life:
        got = life.generate(LONG)

    assert beside.cached[0] == 0
    assert "its cache ends with the engine" in told
    assert "give this engine another `cache`, or use the shared mode" in told
    assert [differences(one, wanted) for one in (beside, got)] == [[], []]
    assert min(got.cached) >= 0.95 * len(PREFIX)


@pytest.mark.parametrize("name", ["", "mine"], ids=["named by identity", "named"])
def test_data_parallel_ranks_have_a_pool_each(name: str, daemon: Daemon, tmp_path: Path) -> None:
    """Each data parallel rank is an engine of its own, so each finds after a kill what it had computed itself."""
    settings = {"cache": name, "start_seconds": 0.5}
    ranks = [job(daemon, settings=settings, data_parallel_index=index) for index in range(2)]
    wanted = reference(ranks[0], LONG)
    with living(ranks[0], tmp_path) as one, living(ranks[1], tmp_path) as two:
        for life in (one, two):
            life.generate(LONG)
            life.kill()
    daemon.wait_until_unused()

    with living(ranks[0], tmp_path) as one, living(ranks[1], tmp_path) as two:
        got = [life.generate(LONG) for life in (one, two)]

    assert [differences(one, wanted) for one in got] == [[], []]
    assert min(found for one in got for found in one.cached) >= 0.95 * len(PREFIX)


def test_offload_beside_owned_memory(daemon: Daemon, tmp_path: Path) -> None:
    """Blocks that left the owned pool come back from the offload pool, and both are warm in the next life."""
    owned = beside_offload(job(daemon, engine=TINY))
    prompts = families(20)
    with living(owned, tmp_path) as life:
        assert churn(life, prompts) == []
        assert churn(life, prompts) == []
        life.kill()

    with living(owned, tmp_path) as life:
        got = life.generate(prompts[-2:])
        assert churn(life, prompts[::-1]) == []
        external = sum(life.metrics("vllm:external_prefix_cache_hits").values())

    assert differences(got, reference(owned, prompts[-2:])) == []
    assert min(got.cached) >= 64
    assert external > 0


@pytest.mark.parametrize("reset_connector", [True, False])
def test_reset_is_kept_beyond_the_engine(
    reset_connector: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """The next life finds neither blocks from before a reset nor those from after it, which may be of other weights."""
    owned = job(daemon)
    with living(owned, tmp_path) as life:
        life.generate(LONG)
        assert life.reset_prefix_cache(reset_connector=reset_connector)
        after = [life.generate(LONG[:1]) for _ in range(2)]
        life.kill()

    with living(owned, tmp_path) as life:
        got = life.generate(LONG[:1])

    assert after[0].cached == got.cached == [0]
    assert after[1].cached[0] >= 0.95 * len(PREFIX)
