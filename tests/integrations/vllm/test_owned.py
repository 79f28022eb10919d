"""Own the proof that an engine whose cache is the daemon's memory is right, and warm after any end of its life."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.births import until
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import Job, Life, differences, living, prompt, reference

pytestmark = pytest.mark.vllm

PREFIX = prompt(1000, seed=99)
LONG = [prompt(1010 + 7 * index, seed=index, prefix=PREFIX) for index in range(2)]
TINY = {
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 40,
}
"""A pool in which few requests fit, and steps in which a prompt takes several."""


def job(
    daemon: Daemon, *, connector: str = "", settings: dict[str, Any] | None = None, **words: Any
) -> Job:
    """Return an engine whose cache is the daemon's memory."""
    module, _, name = connector.rpartition(".")
    transfer = {
        "kv_connector": name or "KVLeaseOwnedConnector",
        "kv_connector_module_path": module or "kvlease.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": daemon.address, **(settings or {})},
    }
    engine = {
        "kv_cache_memory_bytes": 16 << 20,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        **words.pop("engine", {}),
    }
    return Job(engine=engine, kv_transfer_config=transfer, **words)


def chance_of(seed: object) -> random.Random:
    """Return chance that is the same for a seed."""
    return random.Random(str(seed))  # noqa: S311 - nothing is secret


def families(num_prompts: int, first: int = 0) -> list[list[int]]:
    """Return prompts of three families with a prefix each, most of them different, some of them equal."""
    return [
        prompt(
            120 + 13 * (at * 7 % 17),
            seed=at % 9 + 100 * (at % 3),
            prefix=prompt(64 + 32 * (at % 3), seed=50 + at % 3),
        )
        for at in range(first, first + num_prompts)
    ]


def churn(life: Life, prompts: Sequence[Sequence[int]], **order: Any) -> list[str]:
    """Run prompts that arrive one a step, and return what differs from the same without any cache."""
    got = life.generate(prompts, arrivals=list(range(len(prompts))), **order)
    return differences(got, reference(life.job, prompts))


# A warm restart ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_engine_killed_and_started_again_is_warm(
    model: str, daemon: Daemon, tmp_path: Path
) -> None:
    """All but the end of a prefix is there after SIGKILL, as the engine's own blocks; the daemon copied none."""
    owned = job(daemon, model=model, engine={"kv_cache_memory_bytes": 32 << 20})
    wanted = reference(owned, LONG)
    with living(owned, tmp_path) as life:
        assert differences(life.generate(LONG), wanted) == []
        life.kill()

    with living(owned, tmp_path) as life:
        got = life.generate(LONG)
        metrics = life.metrics("vllm:external_prefix_cache_hits", "vllm:prefix_cache_hits")

    assert differences(got, wanted) == []
    assert min(got.cached) >= 0.95 * len(PREFIX)
    assert metrics["vllm:external_prefix_cache_hits"] == 0
    assert metrics["vllm:prefix_cache_hits"] == sum(got.cached)
    assert copied(daemon) == 0
    daemon.wait_until_unused()


def test_engine_ended_in_good_order_leaves_everything(daemon: Daemon, tmp_path: Path) -> None:
    """What was generated is found, too, up to the last full block."""
    owned = job(daemon, sampling={"max_tokens": 40})
    with living(owned, tmp_path) as life:
        said = life.generate(LONG[:1]).requests[0].tokens
    longer = [[*LONG[0], *said, 7]]

    with living(owned, tmp_path) as life:
        got = life.generate(longer)

    assert got.cached[0] >= len(longer[0]) - 2 * 32
    assert differences(got, reference(owned, longer)) == []


def test_pool_of_random_bytes_gives_other_tokens(daemon: Daemon, tmp_path: Path) -> None:
    """What the second life says really comes from the daemon's memory."""
    owned = job(daemon)
    with living(owned, tmp_path) as life:
        life.generate(LONG)
        life.kill()
    daemon.wait_until_unused()
    spoil(daemon)

    with living(owned, tmp_path) as life:
        got = life.generate(LONG)

    assert len(differences(got, reference(owned, LONG))) == len(LONG)


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
    """Blocks are published after the step that writes them; published before, the next life says something else."""
    owned = job(daemon, connector=connector, engine=TINY, is_async=is_async)
    prompts = families(4)
    with living(owned, tmp_path) as life:
        life.begin(prompts, die_before_forward=1)
        assert life.wait() == -9

    with living(owned, tmp_path) as life:
        got = life.generate(prompts)

    assert (differences(got, reference(owned, prompts)) == []) is is_right


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
    """Blocks are retracted before they are overwritten; otherwise the next life says something else."""
    owned = job(daemon, connector=connector, engine=TINY)
    old, new = families(4), [prompt(480, seed=700 + at) for at in range(3)]
    with living(owned, tmp_path) as life:
        life.generate(old)
        life.begin(new, die_before_forward=9)
        assert life.wait() == -9

    with living(owned, tmp_path) as life:
        got = life.generate(old)

    assert (differences(got, reference(owned, old)) == []) is is_right


@pytest.mark.parametrize(
    ("model", "is_async"),
    [("llama", False), ("llama", True), ("hybrid", False)],
    ids=["llama", "llama-async", "hybrid"],
)
def test_lives_killed_amid_churn_say_what_they_say_without_a_cache(
    model: str, is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """Prefix hits, evictions, preemptions, chunked prefill and death at any step: no token differs."""
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


def test_two_ranks_are_warm_after_a_kill(daemon: Daemon, tmp_path: Path) -> None:
    """Every rank finds its own part."""
    owned = job(daemon, engine={"tensor_parallel_size": 2}, is_one_process=False)
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
    """It has memory of its own then, and works."""
    daemon.kill()
    owned = job(daemon, engine=TINY, settings={"start_seconds": 0.5})

    with living(owned, tmp_path) as life:
        found = churn(life, families(6))

    daemon.start()
    assert found == []


def test_engine_goes_on_while_the_daemon_stands_still(daemon: Daemon, tmp_path: Path) -> None:
    """Blocks that are findable are not overwritten meanwhile; afterwards the engine is persisted as before."""
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
        exchanges = daemon.caches()[0].counters["exchanges"]
        until(
            lambda: (
                churn(life, prompts[-2:]) == []
                and daemon.caches()[0].counters["exchanges"] > exchanges
            ),
            "no peace",
        )
        assert churn(life, prompts) == []
        assert churn(life, prompts[-2:]) == []
        life.kill()

    with living(owned, tmp_path) as life:
        got = life.generate(prompts[-2:])
    assert min(got.cached) >= 64
    assert differences(got, reference(owned, prompts[-2:])) == []


@pytest.mark.parametrize("is_wiped", [False, True], ids=["control", "all"])
def test_engine_outlives_the_daemon(is_wiped: bool, daemon: Daemon, tmp_path: Path) -> None:
    """Nothing fails and nothing differs; with its memory gone, the engine is persisted again after its own restart."""
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
            until(lambda: churn(life, prompts[-2:]) == [] and has_exchanged(daemon), "no peace")
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
    """An engine whose pool differs runs on memory of its own, and says in which number."""
    settings = {"cache": "one", "start_seconds": 0.5}
    with living(job(daemon, engine=TINY, settings=settings), tmp_path) as life:
        life.generate(families(2))
    other = job(daemon, engine={**TINY, "num_gpu_blocks_override": 41}, settings=settings)

    with living(other, tmp_path) as life:
        assert churn(life, families(2)) == []
        told = life.told()

    assert "num_blocks" in told
    assert "its cache ends with it" in told


def test_reset_is_kept_beyond_the_engine(daemon: Daemon, tmp_path: Path) -> None:
    """What was computed before a reset is not found by the next life."""
    owned = job(daemon)
    with living(owned, tmp_path) as life:
        life.generate(LONG)
        assert life.reset_prefix_cache()
        life.kill()

    with living(owned, tmp_path) as life:
        got = life.generate(LONG[:1])

    assert got.cached == [0]


def has_exchanged(daemon: Daemon) -> bool:
    """Tell whether any engine has spoken of its blocks since the control process began."""
    return any(cache.counters.get("exchanges", 0) for cache in daemon.caches())


def copied(daemon: Daemon) -> int:
    """Return how many blocks the daemon has copied, for whatever reason."""
    counters = daemon.caches()[0].counters
    return sum(count for name, count in counters.items() if "copied" in name or "reload" in name)


def spoil(daemon: Daemon) -> None:
    """Overwrite the whole pool with random bytes."""
    with daemon.client() as client:
        name = client.stats().caches[0].cache
        with client.attach(name) as worker:
            region = worker.device
            assert region is not None
            region[:] = memoryview(chance_of(1).randbytes(region.nbytes))
