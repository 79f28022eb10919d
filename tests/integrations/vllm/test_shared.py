"""Several real engines on one pool: what is shared, what is fair, and that a death harms nobody."""

import select
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.births import ran, until
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
from tests.integrations.vllm.shares import MANY, PROMPTS, TINY, sharing
from tests.integrations.vllm.storms import begin_storm, end_storm

pytestmark = pytest.mark.vllm

LONG_PREFIX_TOKENS = 1000
LONG = [
    prompt(1010 + 7 * index, seed=index, prefix=prompt(LONG_PREFIX_TOKENS, seed=99))
    for index in range(2)
]
CALLS_IN_ADVANCE_MAX = 12
"""Calls of each engine beyond one for each step: to begin, those that it has banked, and to end."""


def free_blocks(daemon: Daemon) -> int:
    """Count the free blocks and the cached ones that nobody holds."""
    (pool,) = (pool for cache in daemon.caches() for pool in cache.pools if pool.tier == "device")
    return pool.num_blocks - pool.reserved - pool.ready_held


def is_silent(life: Life) -> bool:
    """Tell whether a life has said nothing since its last order."""
    return not select.select([life._answers], [], [], 0)[0]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param({}, id="plain"),
        pytest.param({"is_async": True}, id="async"),
        pytest.param({"engine": {"max_num_batched_tokens": 64, "max_num_seqs": 4}}, id="chunked"),
        pytest.param({"model": "hybrid"}, id="hybrid"),
    ],
)
def test_prefix_of_one_engine_is_a_hit_in_the_other(
    words: dict[str, Any], daemon: Daemon, tmp_path: Path
) -> None:
    """One engine's prefix is a device hit in the other, without a copy and with one call a step."""
    job = sharing(daemon, **words)
    wanted = reference(job, PROMPTS)

    with living(job, tmp_path) as one, living(job, tmp_path) as two:
        first = one.generate(PROMPTS)
        second = two.generate(PROMPTS)
        one.begin(PROMPTS[::-1])
        third, fourth = two.generate(PROMPTS), one.result()
        external = two.metrics("vllm:external_prefix_cache_hits")
        calls = daemon.exchanges()

    backwards = replace(fourth, requests=fourth.requests[::-1])
    assert [differences(got, wanted) for got in (first, second, third, backwards)] == [[]] * 4
    assert min(second.cached) >= 384
    assert min(third.cached) >= 384
    assert set(external.values()) == {0}
    assert (
        calls <= first.steps + second.steps + third.steps + fourth.steps + 2 * CALLS_IN_ADVANCE_MAX
    )
    daemon.wait_until_unused()


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_new_prompts_ask_nobody(model: str, daemon: Daemon, tmp_path: Path) -> None:
    """A prompt with nothing cached needs no call of its own to learn that, and is counted all the same."""
    job = sharing(daemon, model=model)
    new = [prompt(200, seed=500 + index) for index in range(8)]
    wanted = reference(job, new)

    with living(job, tmp_path) as life:
        life.generate(PROMPTS[:1])
        missed_before = daemon.counted("magazine_keys_missed")
        alone, calls = [], 0
        for one in new:
            before = daemon.exchanges()
            life.begin([one], pause_at_step=2)
            life.paused()
            calls += daemon.exchanges() - before
            life.go_on()
            alone.append(life.result())
        until(
            lambda: daemon.counted("magazine_keys_missed") - missed_before >= 6 * len(new),
            "what was missed is not told",
        )
        with living(job, tmp_path) as other:
            found = other.generate(new)

    # Now and then the stock has to be filled.
    assert calls < len(new) / 2
    assert min(found.cached) >= 192 - 32
    said = replace(wanted, requests=[got.requests[0] for got in alone])
    assert differences(said, wanted) == []
    assert differences(found, wanted) == []
    daemon.wait_until_unused()


def test_two_ranks_share_with_two_ranks(daemon: Daemon, tmp_path: Path) -> None:
    """Each rank maps its own part of the pool, and a block is published when both have written theirs.

    The model changes its configuration in the ranks' processes, as some do, which the scheduler's process does not see.
    """
    altering = {"LlamaForCausalLM": "tests.integrations.vllm.altering:AlteringLlama"}
    engine = {"tensor_parallel_size": 2, "model_class_overrides": altering}
    job = sharing(daemon, engine=engine)
    wanted = reference(sharing(daemon), PROMPTS)

    with living(job, tmp_path) as one:
        first = one.generate(PROMPTS)
        with living(job, tmp_path) as two:
            second = two.generate(PROMPTS)

    assert differences(first, wanted) == []
    assert differences(second, wanted) == []
    assert min(second.cached) >= 384
    daemon.wait_until_unused()


def test_full_pool_serves_both_to_the_end(daemon: Daemon, tmp_path: Path) -> None:
    """Two engines that need twice the pool evict, preempt and wait, and complete all answers."""
    job = sharing(daemon, engine=TINY, sampling={"max_tokens": 40})
    wanted = reference(job, MANY)

    with living(job, tmp_path) as one, living(job, tmp_path) as two:
        one.begin(MANY)
        two.begin(MANY[::-1])
        first, second = one.result(), two.result()
        calls = daemon.exchanges()

    assert differences(first, wanted) == []
    assert differences(replace(second, requests=second.requests[::-1]), wanted) == []
    assert calls <= first.steps + second.steps + 2 * CALLS_IN_ADVANCE_MAX
    daemon.wait_until_unused()


def test_prefixes_of_requests_that_wait_leave_room_for_the_first(
    daemon: Daemon, tmp_path: Path
) -> None:
    """An engine that could hit the whole pool holds only as much as leaves room to admit a request."""
    job = sharing(daemon, engine=TINY)
    wanted = reference(job, MANY)

    with living(job, tmp_path) as one, living(job, tmp_path) as two:
        first = one.generate(MANY)
        second = two.generate(MANY)

    assert [differences(got, wanted) for got in (first, second)] == [[], []]


def test_offload_beside_the_shared_pool(daemon: Daemon, tmp_path: Path) -> None:
    """Blocks that left the shared pool come back from the offload pool, and no copy reads overwritten blocks."""
    job = beside_offload(sharing(daemon, engine=TINY))
    wanted = reference(job, MANY)

    with living(job, tmp_path) as one, living(job, tmp_path) as two:
        one.begin(MANY)
        two.begin(MANY)
        first, second = one.result(), two.result()
        third = one.generate(MANY[::-1])
        external = sum(one.metrics("vllm:external_prefix_cache_hits").values())

    assert [differences(got, wanted) for got in (first, second)] == [[], []]
    assert differences(replace(third, requests=third.requests[::-1]), wanted) == []
    assert external > 0
    daemon.wait_until_unused()


def test_engine_with_much_to_do_lets_another_have_its_share(daemon: Daemon, tmp_path: Path) -> None:
    """One engine's few requests end while the other still has many, though those came first."""
    job = sharing(daemon, engine=TINY)

    with living(job, tmp_path) as greedy, living(job, tmp_path) as modest:
        # The first forward pass of an engine takes long.
        modest.generate([prompt(300, seed=99)])
        greedy.begin(MANY * 4, pause_at_step=3)
        greedy.paused()
        modest.begin([prompt(300, seed=100 + index) for index in range(3)])
        greedy.go_on()
        modest.result()

        assert is_silent(greedy)
        greedy.result()


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_engine_that_rests_leaves_room(is_async: bool, daemon: Daemon, tmp_path: Path) -> None:
    """An idle engine gives its stock of blocks back, and keeps at most an eighth of the room."""
    engine = {**TINY, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 512}
    job = sharing(daemon, engine=engine, is_async=is_async)
    room = 199 - 1024 // 32

    with living(job, tmp_path) as life:
        got = life.generate(MANY)
        until(lambda: daemon.in_use() <= room // 8, "it keeps more", 20)

    assert differences(got, reference(job, MANY)) == []


def test_killed_engine_harms_nobody(daemon: Daemon, tmp_path: Path) -> None:
    """A killed engine's blocks are free at once, its published blocks are hits, and the others' answers are right."""
    job = sharing(daemon, engine={**TINY, "num_gpu_blocks_override": 97})
    wanted = reference(job, MANY)

    with living(job, tmp_path) as one, living(job, tmp_path) as two, living(job, tmp_path) as dying:
        before = free_blocks(daemon)
        dying.begin(MANY, pause_at_step=8)
        dying.paused()
        assert free_blocks(daemon) < before
        one.begin(MANY[:8])
        dying.kill()
        until(
            lambda: len(daemon.listed(daemon.caches()[0].cache, "workers").workers) == 4, "no end"
        )
        two.begin(MANY[8:])
        first, second = one.result(), two.result()

    assert differences(first, replace(wanted, requests=wanted.requests[:8])) == []
    assert differences(second, replace(wanted, requests=wanted.requests[8:])) == []
    daemon.wait_until_unused()


def test_engine_that_dies_before_a_forward_published_nothing_of_it(
    daemon: Daemon, tmp_path: Path
) -> None:
    """A block that was named but never written, because its engine died, is never found."""
    job = sharing(daemon, engine={"max_num_batched_tokens": 128, "max_num_seqs": 4})
    wanted = reference(job, PROMPTS)

    with living(job, tmp_path) as other:
        with living(job, tmp_path) as dying:
            dying.begin(PROMPTS, die_before_forward=3)
            dying.wait()
        got = other.generate(PROMPTS)

    assert differences(got, wanted) == []


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_engine_killed_and_started_again_is_warm(
    model: str, daemon: Daemon, tmp_path: Path
) -> None:
    """After SIGKILL the next engine has 95 % of a known prefix as its own blocks; the daemon copied none."""
    job = sharing(daemon, model=model)
    wanted = reference(job, LONG)
    copied_before = daemon.bytes_copied()

    with living(job, tmp_path) as life:
        assert differences(life.generate(LONG), wanted) == []
        life.kill()
    with living(job, tmp_path) as life:
        again = life.generate(LONG)
        external = life.metrics("vllm:external_prefix_cache_hits")

    assert differences(again, wanted) == []
    assert min(again.cached) >= 0.95 * LONG_PREFIX_TOKENS
    assert set(external.values()) == {0}
    assert daemon.bytes_copied() == copied_before
    daemon.wait_until_unused()


def test_pool_of_random_bytes_gives_other_tokens(daemon: Daemon, tmp_path: Path) -> None:
    """Hits of another engine's prefix really read the shared pool: random bytes change the tokens."""
    job = sharing(daemon)

    with living(job, tmp_path) as one, living(job, tmp_path) as two:
        one.generate(LONG)
        daemon.spoil()
        got = two.generate(LONG)

    assert len(contrasts(got, reference(job, LONG))) == len(LONG)


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_abort_storm_in_two_engines_changes_no_token(
    is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """Aborted requests of either engine harm no other request, and leave no block behind."""
    job = sharing(daemon, engine=TINY, is_async=is_async)

    with living(job, tmp_path) as one, living(job, tmp_path) as two:
        prompts = [begin_storm(life, 36, seed=seed) for seed, life in enumerate((one, two))]
        found = [end_storm(life, sent) for life, sent in zip((one, two), prompts, strict=True)]
        calm = two.generate(prompts[0])

    assert [differing for differing, _ in found] == [[], []]
    assert min(num_aborted for _, num_aborted in found) > 6
    assert differences(calm, reference(job, prompts[0])) == []
    daemon.wait_until_unused()


def test_engines_of_unequal_steps_share(daemon: Daemon, tmp_path: Path) -> None:
    """Engines with different longest requests share a pool if every byte lies alike."""
    words: dict[str, Any] = {"model": "hybrid", "engine": {"max_num_batched_tokens": 128}}
    job, other = (sharing(daemon, is_async=is_async, **words) for is_async in (False, True))
    wanted = reference(job, PROMPTS)

    with living(job, tmp_path) as one, living(other, tmp_path) as two:
        first = one.generate(PROMPTS)
        second = two.generate(PROMPTS)
        told = two.told()

    assert [differences(got, wanted) for got in (first, second)] == [[], []]
    assert min(second.cached) >= 384
    assert "blocks_per_longest_request" in told


def test_reset_finds_nothing_of_before(daemon: Daemon, tmp_path: Path) -> None:
    """After a reset neither what this engine nor what others computed before is found."""
    job = sharing(daemon)
    wanted = reference(job, PROMPTS)

    with living(job, tmp_path) as one, living(job, tmp_path) as two:
        one.generate(PROMPTS)
        assert two.reset_prefix_cache()
        after = two.generate(PROMPTS[:1])
        kept = one.generate(PROMPTS)

    assert after.cached == [0]
    assert differences(after, replace(wanted, requests=wanted.requests[:1])) == []
    assert min(kept.cached) >= 384


def test_engine_of_another_layout_is_refused_by_name(daemon: Daemon, tmp_path: Path) -> None:
    """An engine of another layout runs on memory of its own, and its log says what differs."""
    name = {"cache": "ours"}
    with living(sharing(daemon, extra=name), tmp_path):
        other = sharing(daemon, extra={**name, "start_seconds": 0.5}, engine={"block_size": 64})
        with living(other, tmp_path) as life:
            got = life.generate(PROMPTS)
            told = life.told()

    assert "block_tokens" in told
    assert differences(got, reference(other, PROMPTS)) == []


def test_settings_of_offload_are_named_and_do_nothing(daemon: Daemon, tmp_path: Path) -> None:
    """Settings of the offload mode do nothing in the shared mode: no tier is made, and the log says so once."""
    extra = {
        "host_bytes": 1 << 20,
        "pool_bytes": 1,
        "write_policy": "write-through",
        "offload_prompt_only": False,
    }
    with living(sharing(daemon, extra=extra), tmp_path) as life:
        told = life.told()
        tiers = [pool.tier for cache in daemon.caches() for pool in cache.pools]

    assert tiers == ["device"]
    names = "pool_bytes, host_bytes, write_policy, offload_prompt_only"
    assert told.count(f"{names} have no effect in the shared mode") == 1


def test_pool_of_another_mode_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    """A shared engine refuses an owned pool, whose engine has all blocks, rather than wait for ever."""
    job = sharing(daemon, engine=TINY, extra={"cache": "one", "start_seconds": 0.5})
    transfer = {**(job.kv_transfer_config or {}), "kv_connector": "KVLeaseOwnedConnector"}
    owned = replace(job, kv_transfer_config=transfer)

    with living(owned, tmp_path), living(job, tmp_path) as life:
        got = life.generate(PROMPTS[:2])
        told = life.told()

    assert differences(got, reference(job, PROMPTS[:2])) == []
    assert "which differs in format" in told


@pytest.mark.parametrize(
    "law",
    [
        "blocks_that_are_under_way_are_not_asked_for_again",
        "hits_that_turn_out_to_be_duplicates_are_not_used",
        "requests_that_have_loaded_are_not_refused_for_an_old_answer",
    ],
)
def test_scheduler_keeps_its_laws(law: str) -> None:
    """Each law of `steering_laws.py`, which no engine shows on its own, holds."""
    told = ran(Path(__file__).with_name("steering_laws.py"), law, environment=Job().environ())

    assert told.returncode == 0, told.stderr
