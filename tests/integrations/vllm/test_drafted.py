"""Prove that engines that guess tokens ahead are right in every mode, whether their guesses are accepted or not."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from tests.integrations.vllm import shares, test_owned
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import (
    Job,
    Life,
    beside_offload,
    differences,
    living,
    prompt,
    reference,
)
from tests.integrations.vllm.models import EAGLE_HEAD, path_of
from tests.integrations.vllm.offloads import offloading

pytestmark = pytest.mark.vllm

NUM_TOKENS: Final = 100
PIECES: Final = [prompt(30, seed=index) for index in range(3)]
REPEATING: Final = [
    [*piece, *piece, *piece, *prompt(7, seed=50 + index), *piece[:5]]
    for index, piece in enumerate(PIECES)
]
"""What repeats itself lets an engine guess from the prompt."""


def guesses(method: str) -> dict[str, Any]:
    """Return how an engine guesses: from the prompt, by a head, with another model, or with its own, always right."""
    if method == "lookup":
        lengths = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        return {"method": "ngram", "num_speculative_tokens": 3, **lengths}
    if method == EAGLE_HEAD:
        return {"method": "eagle", "model": str(path_of(EAGLE_HEAD)), "num_speculative_tokens": 3}
    draft = path_of("llama", seed=int(method == "other"))
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}


def guessing(mode: str, daemon: Daemon, method: str, **engine: Any) -> Job:
    """Return an engine that guesses three tokens ahead of each that it computes."""
    engine = {**engine, "speculative_config": guesses(method)}
    if mode == "offload":
        job = offloading(daemon, engine=engine, offload_prompt_only=False)
    elif mode == "owned":
        job = test_owned.job(daemon, engine=engine)
    else:
        job = shares.sharing(daemon, engine=engine)
    model = "shallow" if method == EAGLE_HEAD else job.model
    return replace(job, model=model, sampling={"max_tokens": NUM_TOKENS})


def num_guessed(life: Life) -> tuple[float, float]:
    """Return how many tokens an engine guessed, and how many of them were accepted."""
    names = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
    counted = life.metrics(*names)
    guessed, accepted = (counted[name] for name in names)
    return guessed, accepted


@pytest.mark.parametrize(
    ("method", "mode"),
    [("lookup", "offload"), *product(["other", "same"], ["offload", "owned", "shared"])],
)
def test_blocks_of_guessed_tokens_hold_what_was_accepted(
    method: str, mode: str, daemon: Daemon, tmp_path: Path
) -> None:
    """What an engine generated is found after its death, and no guess that was refused is in it."""
    job = guessing(mode, daemon, method)
    wanted = reference(job, REPEATING)
    with living(job, tmp_path) as life:
        first = life.generate(REPEATING)
        guessed, accepted = num_guessed(life)
        life.kill()
    daemon.wait_until_unused()
    longer = [[*one, *said.tokens] for one, said in zip(REPEATING, first.requests, strict=True)]

    with living(job, tmp_path) as life:
        got = life.generate(longer)

    assert guessed > 0
    assert (accepted == guessed) is (method == "same")
    assert differences(first, wanted) == []
    # The last block may not have been told of when the engine died.
    found = zip(got.cached, REPEATING, strict=True)
    assert min(cached - len(one) for cached, one in found) >= NUM_TOKENS - 2 * 32
    assert differences(got, reference(job, longer)) == []
    daemon.wait_until_unused()


@pytest.mark.parametrize("mode", ["offload", "owned", "shared"])
def test_head_guesses_as_well_from_found_blocks(mode: str, daemon: Daemon, tmp_path: Path) -> None:
    """A head (EAGLE) that reads its layer's KV in found blocks is right as often as one that has computed it."""
    job = guessing(mode, daemon, EAGLE_HEAD)
    with living(job, tmp_path) as life:
        first = life.generate(REPEATING)
        computed = num_guessed(life)
        life.kill()
    daemon.wait_until_unused()
    longer = [[*one, *said.tokens] for one, said in zip(REPEATING, first.requests, strict=True)]

    with living(job, tmp_path) as life:
        got = life.generate(longer)
        found = num_guessed(life)

    assert differences(first, reference(job, REPEATING)) == []
    assert differences(got, reference(job, longer)) == []
    # The blocks before the last are found; the last may have been left to the head, or not told of.
    missed = [len(one) - cached for cached, one in zip(got.cached, longer, strict=True)]
    assert max(missed) < 3 * 32
    for guessed, accepted in (computed, found):
        assert accepted > 0.8 * guessed > 0
    daemon.wait_until_unused()


@pytest.mark.parametrize("method", ["other", "same"])
def test_owned_blocks_of_guessed_tokens_come_and_go(
    method: str, daemon: Daemon, tmp_path: Path
) -> None:
    """An engine whose few blocks are evicted, offloaded and loaded again all the time says the same."""
    job = beside_offload(guessing("owned", daemon, method, **test_owned.TINY))
    job = replace(job, sampling={"max_tokens": 40})

    with living(job, tmp_path) as life:
        found = test_owned.churn(life, [*shares.MANY, *shares.MANY[::-1]])
        guessed, accepted = num_guessed(life)

    assert found == []
    assert (accepted == guessed) is (method == "same")
    daemon.wait_until_unused()


@pytest.mark.parametrize("method", ["other", "same"])
def test_engines_that_share_guess_each_for_themselves(
    method: str, daemon: Daemon, tmp_path: Path
) -> None:
    """Two engines that need twice the pool evict, preempt and wait, and what they share holds no refused guess."""
    job = guessing("shared", daemon, method, **shares.TINY)
    job = replace(job, sampling={"max_tokens": 40})
    wanted = reference(job, shares.MANY)

    with living(job, tmp_path) as one, living(job, tmp_path) as two:
        one.begin(shares.MANY)
        second = two.generate(shares.MANY[::-1])
        first = one.result()
        guessed = [num_guessed(life) for life in (one, two)]

    backwards = replace(second, requests=second.requests[::-1])
    assert [differences(got, wanted) for got in (first, backwards)] == [[], []]
    assert all((accepted == drafted) is (method == "same") for drafted, accepted in guessed)
    assert sum(second.cached) > 0
    daemon.wait_until_unused()
