"""Own storms of requests: many arrive at once, share prefixes and are aborted in any state."""

import random
from typing import Any

from tests.integrations.vllm.engine import Life, differences, prompt, reference

_ARRIVALS_PER_STEP = 3
_STEPS_TO_ABORT_MAX = 14


def chance_of(seed: object) -> random.Random:
    """Return a random generator that is the same for equal seeds."""
    return random.Random(str(seed))  # noqa: S311 - nothing is secret


def families(num_prompts: int, first: int = 0) -> list[list[int]]:
    """Return prompts of three families with a prefix each, most of them different, some of them equal."""
    return [
        prompt(
            136 + 13 * (at * 7 % 17),
            seed=at % 9 + 100 * (at % 3),
            prefix=prompt(64 + 32 * (at % 3), seed=50 + at % 3),
        )
        for at in range(first, first + num_prompts)
    ]


def begin_storm(life: Life, num_requests: int, seed: int) -> list[list[int]]:
    """Order a storm in which every second request is aborted while it waits, is prefilled or generates."""
    chance = chance_of(seed)
    prompts = families(num_requests, first=seed)
    arrivals = [at // _ARRIVALS_PER_STEP for at in range(num_requests)]
    aborts = {
        str(at): arrivals[at] + chance.randint(1, _STEPS_TO_ABORT_MAX)
        for at in chance.sample(range(num_requests), num_requests // 2)
    }
    life.begin(prompts, arrivals=arrivals, aborts=aborts)
    return prompts


def end_storm(life: Life, prompts: list[list[int]]) -> tuple[list[str], int]:
    """Wait for the storm's end; return the differences from a run without a cache, and how many were aborted."""
    got = life.result()
    num_aborted = sum(said.finish_reason == "abort" for said in got.requests)
    return differences(got, reference(life.job, prompts)), num_aborted


def storm(life: Life, num_requests: int, seed: int, **after: Any) -> tuple[list[str], int]:
    """Run a storm, and then all its requests again to their ends."""
    prompts = begin_storm(life, num_requests, seed)
    found, num_aborted = end_storm(life, prompts)
    calm = life.generate(prompts, **after)
    return found + differences(calm, reference(life.job, prompts)), num_aborted
