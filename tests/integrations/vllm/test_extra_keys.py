"""Prove that requests with the same tokens find no block of each other if an adapter or a salt tells them apart."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tests.integrations.vllm import shares, test_owned
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import Job, Life, Round, differences, living, prompt
from tests.integrations.vllm.models import ADAPTER, ADAPTER_RANK, path_of
from tests.integrations.vllm.offloads import offloading

pytestmark = pytest.mark.vllm

ENGINE: Final = {"enable_lora": True, "max_lora_rank": ADAPTER_RANK, "max_loras": 2}
IDENTITY: Final = {"adapters": "those of the test"}
PROMPT: Final = prompt(200, seed=1)
WHOLE_BLOCKS_TOKENS: Final = 192


def asked(life: Life) -> Round:
    """Return four answers to one prompt: with nothing else, with a salt, and with each of two adapters.

    They are asked for in turn: on CPUs the engine by itself confuses adapters of one batch.
    """
    adapters = [
        {
            "lora_name": f"adapter {number}",
            "lora_int_id": number,
            "lora_path": str(path_of(ADAPTER, seed=number)),
        }
        for number in (1, 2)
    ]
    orders = [
        {},
        {"salts": {"0": "of another"}},
        *({"adapters": {"0": adapter}} for adapter in adapters),
    ]
    rounds = [life.generate([PROMPT], **order) for order in orders]
    return replace(rounds[0], requests=tuple(one.requests[0] for one in rounds))


def serving(mode: str, daemon: Daemon) -> Job:
    """Return an engine with adapters, which are told to the daemon."""
    if mode == "offload":
        return offloading(daemon, engine=ENGINE, **IDENTITY)
    if mode == "owned":
        return test_owned.job(daemon, engine=ENGINE, settings=IDENTITY)
    return shares.sharing(daemon, engine=ENGINE, extra=IDENTITY)


@pytest.mark.parametrize("mode", ["offload", "owned", "shared"])
def test_blocks_are_found_with_their_own_adapter_and_salt_alone(
    mode: str, daemon: Daemon, tmp_path: Path
) -> None:
    """Each of four requests that are alike but for these computes its own blocks, and finds them in the next life."""
    job = serving(mode, daemon)
    plain = replace(job.reference(), engine={**ENGINE, **job.reference().engine})
    with living(plain, tmp_path) as life:
        wanted = asked(life)

    with living(job, tmp_path) as life:
        first = asked(life)
        again = asked(life)
        life.kill()
    daemon.wait_until_unused()
    with living(job, tmp_path) as life:
        later = asked(life)

    answers = [said.tokens for said in wanted.requests]
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers))) == 3
    assert first.cached == [0] * 4
    assert again.cached == later.cached == [WHOLE_BLOCKS_TOKENS] * 4
    assert [differences(got, wanted) for got in (first, again, later)] == [[], [], []]
    daemon.wait_until_unused()
