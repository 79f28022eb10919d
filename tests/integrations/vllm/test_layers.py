"""Prove that the modes are right for layers without keys and values: latent and recurrent ones.

The engine's CPU backend switches prefix caching off for latent layers; here it is switched on again. It can cache
recurrent layers if a step computes at most one block of a request.
"""

from pathlib import Path
from typing import Any, Final

import pytest

from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import Job, contrasts, differences, living, prompt, reference
from tests.integrations.vllm.offloads import loaded_tokens, num_found, offloading
from tests.integrations.vllm.storms import storm

pytestmark = pytest.mark.vllm

PREFIX_TOKENS: Final = 320
PROMPTS: Final = [
    prompt(350 + 7 * index, seed=index, prefix=prompt(PREFIX_TOKENS, seed=1)) for index in range(4)
]
SMALL: Final = {"max_model_len": 512, "max_num_seqs": 4}
LATENT: Final = {**SMALL, "block_size": 16, "attention_config": {"backend": "CPU_MLA"}}
"""Where the processor has AMX, the engine would choose a backend that takes no float32."""
RECURRENT: Final = {**SMALL, "max_num_batched_tokens": 32}


def keeping(daemon: Daemon, model: str, mode: str = "Offloading", **words: Any) -> Job:
    """Return an engine of latent or recurrent layers in a mode."""
    engine = {**(LATENT if model == "latent" else RECURRENT), **words.pop("engine", {})}
    return offloading(
        daemon,
        model,
        engine,
        connector=f"KVLease{mode}Connector",
        caches_prefixes=True,
        **words,
    )


@pytest.mark.parametrize(
    ("model", "mode", "is_async"),
    [
        ("latent", "Offloading", False),
        ("latent", "Owned", False),
        ("latent", "Shared", False),
        ("recurrent", "Offloading", False),
        ("recurrent", "Offloading", True),
    ],
)
def test_layers_are_found_after_a_kill(
    model: str, mode: str, is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """The next life finds what the killed one computed, from its first request on, and says the same."""
    job = keeping(daemon, model, mode, is_async=is_async)
    wanted = reference(job, PROMPTS)
    with living(job, tmp_path) as life:
        first = life.generate(PROMPTS)
        stored = num_found(daemon)
        life.kill()
    daemon.wait_until_unused()

    with living(job, tmp_path) as life:
        second = life.generate(PROMPTS)
        loaded = loaded_tokens(life)

    assert stored > PREFIX_TOKENS // 32
    assert min(second.cached) >= PREFIX_TOKENS
    assert (loaded >= PREFIX_TOKENS) == (mode == "Offloading")
    assert differences(first, wanted) == []
    assert differences(second, wanted) == []


@pytest.mark.parametrize("model", ["latent", "recurrent"])
def test_storm_over_small_pools_changes_no_token(
    model: str, daemon: Daemon, tmp_path: Path
) -> None:
    """With preemptions, aborts and evictions from both pools, no request finds another prefix's blocks."""
    job = keeping(daemon, model, engine={"num_gpu_blocks_override": 60}, pool_bytes=1 << 20)
    with living(job, tmp_path) as life:
        found, num_aborted = storm(life, 24, seed=3)
        assert loaded_tokens(life) > 0

    assert found == []
    assert num_aborted > 4
    daemon.wait_until_unused()


@pytest.mark.parametrize("model", ["latent", "recurrent"])
def test_layers_of_random_bytes_say_something_else(
    model: str, daemon: Daemon, tmp_path: Path
) -> None:
    """Loaded bytes are really used: random ones change the answers."""
    job = keeping(daemon, model, verify=False)
    with living(job, tmp_path) as life:
        life.generate(PROMPTS)
    daemon.spoil()

    with living(job, tmp_path) as life:
        got = life.generate(PROMPTS)

    assert len(contrasts(got, reference(job, PROMPTS))) == len(PROMPTS)


def test_engine_that_caches_no_prefixes_offloads_nothing(daemon: Daemon, tmp_path: Path) -> None:
    """An engine with prefix caching off, which still asks for prefixes, gets and stores none."""
    job = offloading(daemon, "latent", LATENT)
    with living(job, tmp_path) as life:
        rounds = [life.generate(PROMPTS), life.generate(PROMPTS)]
        told = life.told()

    assert "No kvlease cache for this engine: prefix caching is off" in told
    assert daemon.caches() == []
    assert [one.cached for one in rounds] == [[0] * 4] * 2
    assert [differences(one, reference(job, PROMPTS)) for one in rounds] == [[], []]
