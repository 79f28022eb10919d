"""Prove that offloading is right in engines and pools that are too small for their requests."""

from pathlib import Path

import pytest

from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import (
    differences,
    living,
    prompt,
    reference,
)
from tests.integrations.vllm.offloads import (
    TINY,
    loaded_tokens,
    num_found,
    offloading,
    part,
)
from tests.integrations.vllm.storms import storm

pytestmark = pytest.mark.vllm

CALLS_IN_ADVANCE_MAX = 12
"""Calls to begin and to end, beyond one for each request and one for each step."""
_CHURNED_BYTES = {"llama": 10 << 20, "hybrid": 5 << 20}
"""Pool sizes that hold a part of the churn's blocks."""


@pytest.mark.parametrize(
    ("model", "is_async"), [("llama", True), ("hybrid", False), ("hybrid", True)]
)
def test_churn_in_small_pools_changes_no_token(
    model: str, is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """With chunked prefills, preemptions, aborts and evictions in both pools, all tokens are as without a cache."""
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
    assert differences(rounds[1], part(wanted, None, None, -1)) == []
    # One call for each new request, and one for each step.
    assert calls <= 2 * len(prompts) + rounds[0].steps + rounds[1].steps + CALLS_IN_ADVANCE_MAX
    daemon.wait_until_unused()


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_abort_storm_changes_no_token(is_async: bool, daemon: Daemon, tmp_path: Path) -> None:
    """Requests aborted while they wait, load or generate harm no other request, and leave no block behind."""
    engine = {**TINY, "num_gpu_blocks_override": 40}
    job = offloading(daemon, engine=engine, is_async=is_async, pool_bytes=4 << 20)

    with living(job, tmp_path) as life:
        found, num_aborted = storm(life, 42, seed=int(is_async))
        assert loaded_tokens(life) > 0

    assert found == []
    assert num_aborted > 8
    daemon.wait_until_unused()
