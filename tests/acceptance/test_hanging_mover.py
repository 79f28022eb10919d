"""Laws of a memory mover that stands still: few calls wait for it, and the host pool's blocks are found again."""

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
"""Seconds that a copy may take; after a tenth of them, which is above the minimum, the mover counts as hanging."""


def test_requests_go_on_while_the_mover_stands_still(tmp_path: Path) -> None:
    """Soon no request waits for copies, and blocks leave uncopied; later all blocks of the host pool are hits."""
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
        # The first of these requests wait until the mover counts as hanging.
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
