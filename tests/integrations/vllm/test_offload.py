"""Prove that offloaded blocks are found again by all engines that may find them, and are right."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integrations.vllm import streaming
from tests.integrations.vllm.births import ran, until
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import (
    Job,
    differences,
    living,
    prompt,
    reference,
)
from tests.integrations.vllm.offloads import (
    FOUND_MIN,
    PREFIX_TOKENS,
    PROMPTS,
    TINY,
    loaded_tokens,
    num_found,
    offloading,
    part,
)
from tests.integrations.vllm.storms import families, storm

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("model", "blocks_per_chunk"), [("llama", 1), ("hybrid", 1), ("llama", 2)])
def test_engine_finds_after_its_death_what_it_offloaded(
    model: str, blocks_per_chunk: int, daemon: Daemon, tmp_path: Path
) -> None:
    """Nearly all that one life computed is cached for the next life's first request, which says the same."""
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


def test_chunk_whose_window_has_a_gap_is_found_as_it_was(daemon: Daemon, tmp_path: Path) -> None:
    """If others get blocks out of the middle of a chunk that leaves a window, the rest keeps its place in the row."""
    engine = {**TINY, "num_gpu_blocks_override": 60, "max_model_len": 640}
    engine["max_num_batched_tokens"] = 128
    job = offloading(daemon, "chunked", engine, blocks_per_chunk=3)
    prompts = families(24, first=7)
    with living(job, tmp_path) as life:
        found, _ = storm(life, len(prompts), seed=7)
        for one in prompts:
            found += differences(life.generate([one]), reference(job, [one]))
        assert loaded_tokens(life) > 0

    assert found == []


@pytest.mark.parametrize("model", ["llama", "hybrid"])
@pytest.mark.parametrize("num_said", [1, 4])
def test_session_that_streams_its_prompt_offloads_its_own_blocks(
    model: str, num_said: int, daemon: Daemon, tmp_path: Path
) -> None:
    """A streaming session, whose blocks are listed anew with each piece, stores them for the next life."""
    longer = offloading(daemon, model)
    job = replace(longer, sampling={"max_tokens": num_said})
    tokens = prompt(228)
    pieces = [tokens[:100], tokens[100:164], tokens[164:]]
    words = json.dumps({**job.told(), "pieces": pieces})
    run = ran(Path(streaming.__file__), words, environment=job.environ())
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    assert len(said) == 3 * num_said
    # The next piece replaces the last token that was said to a piece.
    kept = [said[at : at + num_said - 1] for at in range(0, len(said), num_said)]
    whole = [*pieces[0], *kept[0], *pieces[1], *kept[1], *pieces[2]]
    daemon.wait_until_unused()

    with living(longer, tmp_path) as life:
        got = life.generate([whole])

    assert got.cached[0] >= 192
    assert differences(got, reference(longer, [whole])) == []


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_generated_blocks_are_offloaded_as_they_fill(
    is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """If generated blocks are stored, the next life finds them, though the first is killed in the middle."""
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

    # At least 110 tokens have come back, and the last steps' blocks may still be on their way.
    assert (
        min(found - len(one) for found, one in zip(got.cached, PROMPTS, strict=False))
        >= 110 - 3 * 32
    )
    assert differences(got, reference(job, longer)) == []


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_prompt_that_is_answered_with_one_token_is_offloaded(
    is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """A prompt with one step is stored, though the engine has its blocks back when the next step plans that."""
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
    """Two engines at once share the pool, whatever their own caches have, and both give the right answers."""
    job = offloading(daemon, pool_bytes=64 << 20)
    other = offloading(daemon, engine=TINY, pool_bytes=64 << 20)
    wanted = reference(job, PROMPTS)

    with living(job, tmp_path) as one, living(other, tmp_path) as two:
        first = one.generate(PROMPTS[:2])
        second = two.generate(PROMPTS)
        third = one.generate(PROMPTS)

    assert min(second.cached) >= FOUND_MIN
    assert differences(first, part(wanted, 0, 2)) == []
    assert differences(second, wanted) == []
    assert differences(third, wanted) == []


def test_ranks_offload_each_their_own(daemon: Daemon, tmp_path: Path) -> None:
    """Two tensor parallel ranks store and load a half each, also in the next life."""
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
    """Answers are right though each request gets its predecessor's blocks in the step that plans their store."""
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
    """A request that is aborted before it is ever scheduled is neither looked up nor stored."""
    job = offloading(daemon, engine={"max_num_seqs": 1, "max_model_len": 2048})
    with living(job, tmp_path) as life:
        got = life.generate(PROMPTS[:3], aborts={"1": 3})
        stored = num_found(daemon)
        again = life.generate([PROMPTS[1]])

    assert [said.finish_reason for said in got.requests] == ["length", "abort", "length"]
    # The last whole block of each request has tokens of its own.
    assert stored == PREFIX_TOKENS // 32 + 2
    assert differences(again, reference(job, [PROMPTS[1]])) == []


@pytest.mark.parametrize("stats", [True, False])
def test_figures_are_among_the_engines_if_they_are_wanted(
    stats: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """The engine's own metrics count the bytes that were stored, unless `stats` is off."""
    with living(offloading(daemon, stats=stats), tmp_path) as life:
        life.generate(PROMPTS[:1])
        figures = life.metrics("vllm:kv_offload_store_bytes")

    assert (sum(figures.values()) > 0) is stats


def test_blocks_come_back_from_the_host_pool(daemon: Daemon, tmp_path: Path) -> None:
    """Blocks evicted to the host pool are brought back while their request waits, and the answer is the same."""
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


def test_reset_begins_a_new_generation(daemon: Daemon, tmp_path: Path) -> None:
    """After a reset this engine finds no older block, but finds those that it computes anew."""
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
    assert differences(after, part(wanted, 0, 1)) == []
    assert differences(again, part(wanted, 0, 1)) == []


def test_reset_follows_a_reset_amid_a_store(daemon: Daemon, tmp_path: Path) -> None:
    """Two resets without a step between them, as around an update of weights, are no error while a store is left."""
    job, said = offloading(daemon, engine=TINY, is_async=True), {"max_tokens": 1}
    asked = [prompt(512, seed=1)]
    with living(job, tmp_path) as life:
        before = life.generate(asked, sampling=said)
        assert life.reset_prefix_cache()
        assert life.reset_prefix_cache()
        after = life.generate(asked, sampling=said)

    assert after.cached == [0]
    assert differences(after, before) == []


@pytest.mark.parametrize(
    "law",
    [
        "requests_ask_once",
        "absent_requests_ask_nobody",
        "new_requests_are_known_by_their_first_block",
        "what_no_step_told_is_told_at_the_end",
        "news_wait_for_stores_that_are_under_way",
        "news_are_told_while_the_engine_computes",
        "a_reset_forgets_what_was_not_told",
        "requests_that_wait_are_asked_for_together",
        "first_tokens_wait_for_no_news",
        "long_requests_ask_more_than_once",
        "keys_that_nobody_lists_are_asked_together",
        "failed_stores_are_not_found",
        "refused_requests_compute",
        "blocks_below_are_waited_for",
        "rows_outlive_a_reset_until_their_jobs_end",
        "stores_into_a_lost_pool_publish_nothing",
    ],
)
def test_manager_keeps_its_laws(law: str, daemon: Daemon) -> None:
    """Each law of `manager_laws.py`, which no engine shows on its own, holds."""
    script = Path(__file__).with_name("manager_laws.py")
    told = ran(script, daemon.address, law, environment=Job().environ())

    assert told.returncode == 0, told.stderr


def test_spec_below_another_connector_says_that_nothing_is_cached(
    daemon: Daemon, tmp_path: Path
) -> None:
    """The spec below vLLM's own connector attaches to no daemon; the log says so once and names the right one."""
    own = offloading(daemon, engine=TINY)
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket": daemon.address,
            "spec_name": "KVLeaseOffloadingSpec",
            "spec_module_path": "kvlease.integrations.vllm.offload.spec",
        },
    }

    with living(replace(own, kv_transfer_config=transfer), tmp_path) as life:
        got = life.generate(PROMPTS[:2])
        told = life.told()

    assert differences(got, reference(own, PROMPTS[:2])) == []
    assert told.count("set kv_connector to KVLeaseOffloadingConnector") == 1
    assert "ERROR" in next(line for line in told.splitlines() if "kvlease caches nothing:" in line)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param({"pool_bytes": 1}, "pool_bytes is 1, but one chunk takes", id="small pool"),
        pytest.param(
            {"socket": "http+unix:///nowhere/http.sock"},
            "only through its local socket",
            id="other address",
        ),
        pytest.param(
            {"socket": "nowhere.sock"}, "/nowhere.sock cannot be reached", id="path from here"
        ),
    ],
)
def test_setting_that_leads_nowhere_is_explained(
    settings: dict[str, object], said: str, daemon: Daemon, tmp_path: Path
) -> None:
    """With a useless setting the engine goes on without a cache, and its log says once what to change."""
    job = offloading(daemon, engine=TINY, start_seconds=0.5, **settings)

    with living(job, tmp_path) as life:
        got = life.generate(PROMPTS[:1])
        told = life.told()

    assert differences(got, reference(job, PROMPTS[:1])) == []
    assert told.count(said) == 1
