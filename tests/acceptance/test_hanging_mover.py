"""Laws of a memory mover that stands still: few wait for it, and what the host pool has is found again."""

import os
import signal
from pathlib import Path

import pytest

from kvlease import CacheOptions
from tests.acceptance.serving import served
from tests.acceptance.tiering import (
    attached,
    child,
    compute,
    inputs_of,
    prompt,
    reason,
    status,
)

pytestmark = pytest.mark.acceptance

NUM_BLOCKS = 16
BLOCKS_A_PROMPT = 4
SECONDS_MAX = 40
"""The patience with the mover, of which a tenth, and not the least possible, is that until it counts as hanging."""


def test_requests_go_on_while_the_mover_stands_still(tmp_path: Path) -> None:
    """After a while none waits for copies, and blocks leave without; all of what the host pool had is served later."""
    plan = inputs_of(device_blocks=NUM_BLOCKS, host_slots=4 * NUM_BLOCKS)
    on_evict = CacheOptions(write_policy="on-evict")
    with (
        served(tmp_path / "run", "--mover-seconds-max", str(SECONDS_MAX)) as serving,
        attached(serving, plan, on_evict) as (client, worker),
    ):
        prompts = [prompt(number, BLOCKS_A_PROMPT) for number in range(16)]
        for tokens in prompts[:8]:
            compute(worker, tokens).release()
        mover = child(serving, "mover")

        os.kill(mover, signal.SIGSTOP)
        # The first of these wait, until the mover counts as hanging.
        granted = [compute(worker, tokens) for tokens in prompts[8:10]]
        shown = status(client, "host"), reason(client, "host")
        for lease in granted:
            lease.release()
        hits = []
        for tokens in prompts[10:] * 8:
            lease = compute(worker, tokens)
            hits.append(lease.host_hit_tokens)
            lease.release()
        os.kill(mover, signal.SIGCONT)

        assert shown[0] == "off"
        assert "no copy has ended for 4 s" in shown[1]
        assert not any(hits)
        serving.until(lambda: status(client, "host") == "ready")
        again = compute(worker, prompts[0])
        assert again.host_hit_tokens == len(prompts[0])
