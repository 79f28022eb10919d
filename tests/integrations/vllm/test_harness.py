"""Prove that the harness sees what it must: hits, aborts, deaths and differences."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integrations.vllm.engine import Job, contrasts, differences, living, prompt, reference

pytestmark = pytest.mark.vllm

PREFIX = prompt(320, seed=1)
PROMPTS = [prompt(400 + 7 * index, seed=index, prefix=PREFIX) for index in range(4)]


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_engine_with_prefix_hits_says_what_it_says_without(model: str, tmp_path: Path) -> None:
    """The engine's own prefix cache is right on this machine, and rounds tell what was cached."""
    job = Job(model=model)
    wanted = reference(job, PROMPTS)

    with living(job, tmp_path) as life:
        first = life.generate(PROMPTS)
        second = life.generate(PROMPTS)

    assert differences(first, wanted) == []
    assert differences(second, wanted) == []
    assert min(second.cached) >= 320


def test_other_prompts_differ() -> None:
    """A comparison of answers to other prompts finds differences."""
    job = Job(sampling={"max_tokens": 4})
    wanted = reference(job, PROMPTS)

    assert len(contrasts(reference(job, PROMPTS[::-1]), wanted)) == len(PROMPTS)


def test_life_killed_before_a_forward_ends_at_once(tmp_path: Path) -> None:
    """A life dies before the named forward pass, and a new one can start in its place."""
    job = Job()
    with living(job, tmp_path) as life:
        life.begin(PROMPTS, die_before_forward=3)
        assert life.wait() == -9

    with living(job, tmp_path) as life:
        life.begin(PROMPTS, pause_at_step=2)
        assert life.paused() == 2
        life.kill()


def test_abort_keeps_the_others(tmp_path: Path) -> None:
    """An aborted request says less, and all others say what they say without an abort."""
    job = replace(Job(), sampling={"max_tokens": 8})
    wanted = reference(job, PROMPTS)

    with living(job, tmp_path) as life:
        got = life.generate(PROMPTS, aborts={"1": 3}, arrivals=[0, 0, 2, 4])

    assert got.requests[1].finish_reason == "abort"
    assert len(got.requests[1].tokens) < 8
    assert differences(got, wanted) == []
