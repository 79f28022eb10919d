"""A disk that refuses writes: no process of a real daemon ends by it, and no wrong byte is served."""

import itertools
import resource
from pathlib import Path

import pytest

from kvlease.units import BYTES_PER_SECTOR
from tests.acceptance.serving import served
from tests.acceptance.tiering import attached, child, compute, inputs_of, prompt, reason, status

pytestmark = pytest.mark.acceptance

BLOCKS_A_PROMPT = 4
NUM_PROMPTS = 16


def test_limit_of_file_sizes_turns_the_store_off_and_ends_nobody(tmp_path: Path) -> None:
    """Above a limit of file sizes the mover gets errors, not a fatal signal; once it is lifted it goes on."""
    directory = tmp_path / "disk"
    directory.mkdir(mode=0o700)
    plan = inputs_of(device_blocks=8, host_slots=8, disk_slots=NUM_PROMPTS * BLOCKS_A_PROMPT)
    with (
        served(tmp_path / "run", "--disk-dir", str(directory)) as serving,
        attached(serving, plan) as (client, worker),
    ):
        serving.until(lambda: status(client, "disk") == "ready")
        numbers = itertools.cycle(range(NUM_PROMPTS))

        def go_on() -> None:
            compute(worker, prompt(next(numbers), BLOCKS_A_PROMPT)).release()

        mover = child(serving, "disk-mover")
        unlimited = resource.prlimit(mover, resource.RLIMIT_FSIZE)
        go_on()

        resource.prlimit(mover, resource.RLIMIT_FSIZE, (BYTES_PER_SECTOR, unlimited[1]))
        while "ulimit -f" not in reason(client, "disk"):
            go_on()
        resource.prlimit(mover, resource.RLIMIT_FSIZE, unlimited)
        serving.until(lambda: status(client, "disk") == "ready")

        for _ in range(2 * NUM_PROMPTS):
            go_on()
        assert child(serving, "disk-mover") == mover
