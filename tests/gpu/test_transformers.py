"""A model on a GPU generates over a pool there what it generates without kvlease."""

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvlease import Client, PlanInputs, Worker
from kvlease.integrations.transformers import LeasedCache, generate
from tests.acceptance.serving import Serving
from tests.gpu.test_daemon import serving
from tests.integrations.transformers.leasing import taking

__all__ = ["serving"]

TOKENS_PER_BLOCK: Final = 16
NUM_NEW: Final = 24
PROMPT: Final = list(range(3, 203))


@pytest.fixture(scope="module")
def model(device: str) -> LlamaForCausalLM:
    """Return a small model on the GPU, whose best two tokens are never close to a tie."""
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA, or no GPU")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.08,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    made: Any = LlamaForCausalLM(config)
    model: LlamaForCausalLM = made.eval().to(device)
    return model


@pytest.fixture
def worker(serving: Serving, model: LlamaForCausalLM) -> Iterator[Worker]:
    """Attach a worker to a new cache of the model."""
    inputs = PlanInputs(
        model_config=model.config.to_json_string(),
        kv_dtype="float32",
        tokens_per_block=TOKENS_PER_BLOCK,
        device_blocks=32,
        host_bytes=4 << 20,
    )
    with Client(serving.address("unix"), on_doubt="raise") as client:
        client.register("model", inputs)
        serving.until(lambda: client.get_cache("model").status == "ready")
        with client.attach("model") as worker:
            yield worker
        serving.until(lambda: client.stats("model").caches[0].num_workers == 0)
        client.delete_cache("model")


def plain(model: LlamaForCausalLM) -> tuple[int, ...]:
    """Return what the model generates without kvlease."""
    prompt = torch.tensor([PROMPT], device=model.device)
    output = model.generate(prompt, max_new_tokens=NUM_NEW, do_sample=False)
    return tuple(output[0, len(PROMPT) :].tolist())


def test_hits_give_the_same_tokens(worker: Worker, model: LlamaForCausalLM) -> None:
    """A request and a second one that hits the first one's blocks have the tokens of plain Transformers."""
    first = generate(model, worker, PROMPT, max_new_tokens=NUM_NEW, request_id="first")
    second = generate(model, worker, PROMPT, max_new_tokens=NUM_NEW, request_id="second")

    assert first.tokens == second.tokens == plain(model)
    assert first.device_hit_tokens == 0
    assert second.device_hit_tokens == len(PROMPT) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert first.recomputes == second.recomputes == 0


def test_evicted_request_goes_on_elsewhere(worker: Worker, model: LlamaForCausalLM) -> None:
    """A request that is evicted in the middle and reloaded to other places has the tokens of plain Transformers."""

    def interfere(cache: LeasedCache | None, num_new: int) -> None:
        if num_new == NUM_NEW // 2:
            assert cache is not None
            cache.evict()
            with worker.reserve("others", num_tokens=8 * TOKENS_PER_BLOCK, wait_ms=10_000):
                cache.reload()

    made = generate(
        model, worker, PROMPT, max_new_tokens=NUM_NEW, request_id="third", on_step=interfere
    )

    assert made.tokens == plain(model)
    assert made.recomputes == 0


def test_generation_of_transformers_is_unchanged(worker: Worker, model: LlamaForCausalLM) -> None:
    """`model.generate` over a leased cache gives the same tokens, twice."""
    prompt = torch.tensor([PROMPT], device=model.device)
    for name in ("once", "twice"):
        with LeasedCache.reserve(worker, PROMPT, request_id=name, model=model) as cache:
            output = model.generate(
                prompt, **taking(model, cache), max_new_tokens=NUM_NEW, do_sample=False
            )
            cache.commit(PROMPT)

        assert tuple(output[0, len(PROMPT) :].tolist()) == plain(model)
