"""Own the proof that offloading to the daemon is right, is found again by whoever may, and never hurts an engine."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.births import ran, until
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import (
    Job,
    Life,
    contrasts,
    differences,
    living,
    prompt,
    reference,
)
from tests.integrations.vllm.jobs import HASTY_MS, PATIENT_MS
from tests.integrations.vllm.storms import storm

pytestmark = pytest.mark.vllm

PREFIX_TOKENS = 1000
PREFIX = prompt(PREFIX_TOKENS, seed=1)
PROMPTS = [prompt(1040 + 7 * index, seed=index, prefix=PREFIX) for index in range(4)]
FOUND_MIN = 0.95 * PREFIX_TOKENS
TINY = {
    "num_gpu_blocks_override": 100,
    "max_model_len": 1152,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
}
"""An engine whose requests are prefilled in pieces, push each other out of its cache and are preempted."""
CALLS_IN_ADVANCE_MAX = 12
"""Calls beyond those, to begin and to end."""
MODELS = ["llama", "hybrid"]
_CHURNED_BYTES = {"llama": 10 << 20, "hybrid": 5 << 20}
"""A pool that holds some of what the churn makes."""


def offloading(
    daemon: Daemon | str,
    model: str = "llama",
    engine: Mapping[str, Any] | None = None,
    **words: Any,
) -> Job:
    """Return an engine that offloads; further words are the connector's settings, or the job's."""
    address = daemon if isinstance(daemon, str) else daemon.address
    of_job = {name: words.pop(name) for name in ("is_async", "is_one_process") if name in words}
    return Job(
        model=model,
        engine=engine or {},
        kv_transfer_config={
            "kv_connector": "KVLeaseOffloadingConnector",
            "kv_connector_module_path": "kvlease.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "socket": address,
                "deadline_ms": PATIENT_MS,
                **words,
            },
        },
        **of_job,
    )


def num_found(daemon: Daemon) -> int:
    """Return how many blocks of the pool can be found."""
    return sum(
        pool.ready + pool.ready_held
        for cache in daemon.caches()
        for pool in cache.pools
        if pool.tier == "device"
    )


def loaded_tokens(life: Life) -> float:
    """Return the tokens that the life has loaded from outside."""
    return life.metrics("vllm:external_prefix_cache_hits")["vllm:external_prefix_cache_hits"]


@pytest.mark.parametrize(("model", "blocks_per_chunk"), [("llama", 1), ("hybrid", 1), ("llama", 2)])
def test_engine_finds_after_its_death_what_it_offloaded(
    model: str, blocks_per_chunk: int, daemon: Daemon, tmp_path: Path
) -> None:
    """What one life computed is nearly all cached for the first request of the next, and says the same."""
    job = offloading(daemon, model, blocks_per_chunk=blocks_per_chunk)
    wanted = reference(job, PROMPTS)
    with living(job, tmp_path) as life:
        first = life.generate(PROMPTS)
        stored = num_found(daemon)
        life.kill()
    daemon.wait_until_unused()

    with living(job, tmp_path) as life:
        second = life.generate(PROMPTS)
        assert loaded_tokens(life) >= FOUND_MIN
        told = life.told()

    assert re.search(
        r"INFO .* Attached to the kvlease daemon as worker \d+ of cache vllm-offload-", told
    )
    assert stored >= PREFIX_TOKENS // 32 // blocks_per_chunk
    assert min(second.cached) >= FOUND_MIN
    assert differences(first, wanted) == []
    assert differences(second, wanted) == []
    daemon.wait_until_unused()


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_generated_blocks_are_offloaded_as_they_fill(
    is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """Where generated blocks are to be stored, the next life finds them, though the first was killed in the middle."""
    job = offloading(daemon, is_async=is_async, offload_prompt_only=False)
    said = reference(replace(job, sampling={"max_tokens": 120}), PROMPTS[:2]).requests
    longer = [[*one, *two.tokens] for one, two in zip(PROMPTS, said, strict=False)]
    with living(job, tmp_path) as life:
        life.begin(PROMPTS[:2], sampling={"max_tokens": 120}, pause_at_step=118)
        life.paused()
        life.kill()
    daemon.wait_until_unused()

    with living(job, tmp_path) as life:
        got = life.generate(longer)

    # 110 tokens have come back at least, and the last steps' blocks may be on their way.
    assert (
        min(found - len(one) for found, one in zip(got.cached, PROMPTS, strict=False))
        >= 110 - 3 * 32
    )
    assert differences(got, reference(job, longer)) == []


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_prompt_that_is_answered_with_one_token_is_offloaded(
    is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """Its store is planned in the step behind its only one, when its blocks are the engine's again."""
    said = {"max_tokens": 1}
    job = offloading(daemon, is_async=is_async)
    wanted = reference(replace(job, sampling=said), PROMPTS)
    with living(job, tmp_path) as life:
        first = life.generate(PROMPTS, sampling=said)
        until(lambda: num_found(daemon) >= PREFIX_TOKENS // 32 + len(PROMPTS), "not all is stored")
        life.kill()
    daemon.wait_until_unused()

    with living(job, tmp_path) as life:
        second = life.generate(PROMPTS, sampling=said)

    assert min(second.cached) >= FOUND_MIN
    assert differences(first, wanted) == []
    assert differences(second, wanted) == []


def test_engines_find_what_others_offloaded(daemon: Daemon, tmp_path: Path) -> None:
    """Two engines that live at once share the pool, whatever the one's own cache has; both say what is right."""
    job = offloading(daemon, pool_bytes=64 << 20)
    other = offloading(daemon, engine=TINY, pool_bytes=64 << 20)
    wanted = reference(job, PROMPTS)

    with living(job, tmp_path) as one, living(other, tmp_path) as two:
        first = one.generate(PROMPTS[:2])
        second = two.generate(PROMPTS)
        third = one.generate(PROMPTS)

    assert min(second.cached) >= FOUND_MIN
    assert differences(first, _part(wanted, 0, 2)) == []
    assert differences(second, wanted) == []
    assert differences(third, wanted) == []


def test_ranks_offload_each_their_own(daemon: Daemon, tmp_path: Path) -> None:
    """Two tensor parallel ranks store and load their own halves, also in the next life."""
    engine = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
    job = offloading(daemon, engine=engine)
    wanted = reference(offloading(daemon), PROMPTS)
    with living(job, tmp_path) as life:
        first = life.generate(PROMPTS)
        life.kill()

    with living(job, tmp_path) as life:
        second = life.generate(PROMPTS)

    assert min(second.cached) >= FOUND_MIN
    assert differences(first, wanted) == []
    assert differences(second, wanted) == []
    daemon.wait_until_unused()


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_blocks_that_the_next_request_gets_are_stored_before(
    is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """Where each request takes nearly all blocks of the one before, in the step that plans its store, all is right."""
    said = {"max_tokens": 1}
    engine = {"num_gpu_blocks_override": 40, "max_model_len": 1152}
    job = offloading(daemon, engine=engine, is_async=is_async, pool_bytes=32 << 20)
    prompts = [prompt(1030 + 20 * index, seed=300 + index) for index in range(6)]
    with living(job, tmp_path) as life:
        life.generate(prompts, sampling=said)
        until(lambda: num_found(daemon) >= sum(len(one) // 32 for one in prompts), "not all stored")
        life.kill()
    daemon.wait_until_unused()

    with living(job, tmp_path) as life:
        found = life.generate(prompts, sampling=said)

    assert min(found.cached) >= 1024
    assert differences(found, reference(replace(job, sampling=said), prompts)) == []


def test_requests_that_end_unscheduled_are_forgotten(daemon: Daemon, tmp_path: Path) -> None:
    """One that is aborted while it waits, of which nobody was told, is neither looked up nor stored."""
    job = offloading(daemon, engine={"max_num_seqs": 1, "max_model_len": 2048})
    with living(job, tmp_path) as life:
        got = life.generate(PROMPTS[:3], aborts={"1": 3})
        stored = num_found(daemon)
        again = life.generate([PROMPTS[1]])

    assert [said.finish_reason for said in got.requests] == ["length", "abort", "length"]
    # The last whole block of each has tokens of its own.
    assert stored == PREFIX_TOKENS // 32 + 2
    assert differences(again, reference(job, [PROMPTS[1]])) == []


@pytest.mark.parametrize(
    ("model", "is_async"), [("llama", True), ("hybrid", False), ("hybrid", True)]
)
def test_churn_in_small_pools_changes_no_token(
    model: str, is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """Chunked prefills, preemptions, aborts and evictions in both pools leave every token as it is without a cache."""
    prompts = [
        prompt(300 + 13 * index, seed=index, prefix=prompt(256, seed=100 + index % 3))
        for index in range(24)
    ]
    job = offloading(
        daemon, model, engine=TINY, is_async=is_async, pool_bytes=_CHURNED_BYTES[model]
    )
    order = {"arrivals": [index // 2 for index in range(24)], "aborts": {"3": 9, "11": 14}}
    wanted = reference(job, prompts)

    with living(job, tmp_path) as life:
        rounds = [life.generate(prompts, **order), life.generate(prompts[::-1])]
        assert loaded_tokens(life) > 0
        assert daemon.in_use() <= num_found(daemon)
        calls = daemon.exchanges()

    assert differences(rounds[0], wanted) == []
    assert differences(rounds[1], _part(wanted, None, None, -1)) == []
    # One for each new request, and one a step.
    assert calls <= 2 * len(prompts) + rounds[0].steps + rounds[1].steps + CALLS_IN_ADVANCE_MAX
    daemon.wait_until_unused()


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_abort_storm_changes_no_token(is_async: bool, daemon: Daemon, tmp_path: Path) -> None:
    """Requests that are aborted while they wait, load or generate harm no other, and leave no block behind."""
    engine = {**TINY, "num_gpu_blocks_override": 40}
    job = offloading(daemon, engine=engine, is_async=is_async, pool_bytes=4 << 20)

    with living(job, tmp_path) as life:
        found, num_aborted = storm(life, 42, seed=int(is_async))
        assert loaded_tokens(life) > 0

    assert found == []
    assert num_aborted > 8
    daemon.wait_until_unused()


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "control killed"])
def test_requests_go_on_while_the_daemon_is_away(
    is_frozen: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """An engine whose daemon does not answer says what is right, and stores again when it does."""
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
    """An engine whose daemon is killed says what is right, and uses the next one that is there by itself."""
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
    """Where no daemon is yet, an engine runs without cache; it uses the pool of the one that comes by itself."""
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

    assert differences(got, _part(reference(job, PROMPTS), 0, 2)) == []


def test_blocks_come_back_from_the_host_pool(daemon: Daemon, tmp_path: Path) -> None:
    """What the pool evicted to the tier below is brought back while its request waits, and says the same."""
    others = [prompt(1040, seed=50 + index) for index in range(4)]
    job = offloading(daemon, pool_bytes=6 << 20, host_bytes=32 << 20)
    wanted = reference(job, PROMPTS[:1])
    copied_before = daemon.bytes_copied()
    with living(job, tmp_path) as life:
        life.generate(PROMPTS[:1])
        for other in others:
            life.generate([other])
        life.kill()
    with daemon.client() as client:
        (cache,) = client.stats().caches
        assert any(pool.tier == "host" and pool.ready for pool in cache.pools)

    with living(job, tmp_path) as life:
        got = life.generate(PROMPTS[:1])

    assert daemon.bytes_copied() > copied_before
    assert got.cached[0] >= FOUND_MIN
    assert differences(got, wanted) == []


@pytest.mark.parametrize("model", MODELS)
def test_loads_of_spoiled_blocks_degrade_to_misses(
    model: str, daemon: Daemon, tmp_path: Path
) -> None:
    """Loads that fail, in one group and in several, end in requests that compute, and say what is right."""
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
    """What is loaded is really used: with checks off, random bytes say something else."""
    job = offloading(daemon, model, verify=False)
    wanted = reference(job, PROMPTS)
    with living(job, tmp_path) as life:
        life.generate(PROMPTS)
    daemon.spoil()

    with living(job, tmp_path) as life:
        got = life.generate(PROMPTS)

    assert len(contrasts(got, wanted)) == len(PROMPTS)


def test_reset_begins_a_new_generation(daemon: Daemon, tmp_path: Path) -> None:
    """After a reset nothing of before is found by this engine, and what it computes anew is."""
    job = offloading(daemon)
    wanted = reference(job, PROMPTS)
    with living(job, tmp_path) as life:
        life.generate(PROMPTS)
        assert life.reset_prefix_cache()
        after = life.generate(PROMPTS[:1])
        assert life.reset_prefix_cache(reset_connector=False)
        again = life.generate(PROMPTS[:1])

    assert after.cached == [0]
    assert again.cached[0] >= FOUND_MIN
    assert differences(after, _part(wanted, 0, 1)) == []
    assert differences(again, _part(wanted, 0, 1)) == []


@pytest.mark.parametrize(
    "law",
    [
        "requests_ask_once",
        "absent_requests_ask_nobody",
        "new_requests_are_known_by_their_first_block",
        "news_wait_for_stores_that_are_under_way",
        "a_reset_forgets_what_was_not_told",
        "requests_that_wait_are_asked_for_together",
        "first_tokens_wait_for_no_news",
        "long_requests_ask_more_than_once",
        "keys_that_nobody_lists_are_asked_together",
        "failed_stores_are_not_found",
        "refused_requests_compute",
        "blocks_below_are_waited_for",
        "rows_outlive_a_reset_until_their_jobs_end",
    ],
)
def test_manager_keeps_its_laws(law: str, daemon: Daemon) -> None:
    """What no engine shows on its own holds, too; `manager_laws.py` says what it is."""
    script = Path(__file__).with_name("manager_laws.py")
    told = ran(script, daemon.address, law, environment=Job().environ())

    assert told.returncode == 0, told.stderr


def _part(wanted: Any, first: int | None, end: int | None, step: int = 1) -> Any:
    """Return some requests of a round."""
    requests = wanted.requests[first:end:step]
    return type(wanted)(
        requests=requests, steps=wanted.steps, seconds=wanted.seconds, spans=wanted.spans
    )
