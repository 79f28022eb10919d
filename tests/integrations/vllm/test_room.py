"""Prove that an engine for whose cache the daemon has no memory is told which settings to change, and serves."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.vllm.daemon import Daemon, serving
from tests.integrations.vllm.engine import differences, living, reference
from tests.integrations.vllm.offloads import PROMPTS, TINY, offloading
from tests.integrations.vllm.shares import sharing

pytestmark = pytest.mark.vllm

MORE_THAN_ANY_PLAN = 1 << 80
ONE = PROMPTS[:1]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Run a daemon that has little memory."""
    with serving(tmp_path_factory.mktemp("narrow"), "--memory-bytes-max", "4MiB") as daemon:
        yield daemon


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        pytest.param({"pool_bytes": 1 << 44}, "pool_bytes is 17592186044416;", id="machine"),
        pytest.param({"pool_bytes": MORE_THAN_ANY_PLAN}, "pool_bytes is 12089258", id="plan"),
        pytest.param({}, "without pool_bytes the pool is 4 times the engine's own", id="default"),
    ],
)
def test_pool_that_is_too_large_is_told_what_fits(
    settings: dict[str, int], asked: str, narrow: Daemon, tmp_path: Path
) -> None:
    """The log names the setting once, as given, and a number of bytes with which the engine attaches."""
    job = offloading(narrow, engine=TINY, start_seconds=0.5, **settings)
    with living(job, tmp_path) as life:
        got = life.generate(ONE)
    told = life.log.read_text()
    life.log.unlink()
    (most,) = re.findall(r"set pool_bytes to at most (\d+)", told)

    with living(offloading(narrow, engine=TINY, pool_bytes=int(most)), tmp_path) as life:
        fitting = life.generate(ONE)
    assert narrow.has_forgotten()

    assert asked in told
    assert "Attached to the kvlease daemon" in life.log.read_text()
    assert [differences(one, reference(job, ONE)) for one in (got, fitting)] == [[], []]


def test_host_pool_that_leaves_no_room_is_told(narrow: Daemon, tmp_path: Path) -> None:
    """If the host pool alone leaves no room, the log says to lower that."""
    job = offloading(narrow, engine=TINY, start_seconds=0.5, pool_bytes=1 << 20, host_bytes=8 << 20)

    with living(job, tmp_path) as life:
        told = life.told()

    assert told.count("lower host_bytes, delete a cache") == 1


def test_engine_whose_own_cache_is_too_large_is_told_by_its_own_settings(
    narrow: Daemon, tmp_path: Path
) -> None:
    """An engine whose cache is the daemon's memory is told vLLM's own settings for its size."""
    job = sharing(narrow, engine=TINY, extra={"start_seconds": 0.5})

    with living(job, tmp_path) as life:
        got = life.generate(ONE)
        told = life.told()

    assert "lower kv_cache_memory_bytes or num_gpu_blocks_override" in told
    assert differences(got, reference(job, ONE)) == []
