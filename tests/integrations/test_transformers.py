"""Own the proof that a model over leased blocks says what it says without them, whatever happens to its lease."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvlease import Client, EngineInputs, PlanInputs  # noqa: E402
from kvlease.errors import InvalidError, KVLeaseError, WrongStateError  # noqa: E402
from kvlease.integrations._models import cache_argument  # noqa: E402
from kvlease.integrations.transformers import (  # noqa: E402
    Generation,
    LeasedCache,
    generate,
    model_digest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from transformers import Gemma3ForCausalLM, LlamaForCausalLM, PreTrainedModel

    from kvlease import Worker

pytestmark = pytest.mark.acceptance

TOKENS_PER_BLOCK = 16
DEVICE_BLOCKS = 24
NUM_NEW = 40
START_SECONDS_MAX = 20.0


def taking(model: PreTrainedModel, cache: LeasedCache) -> Mapping[str, LeasedCache]:
    """Return the argument by which a model takes its cache in this version of Transformers."""
    return {cache_argument(model): cache}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Build a small model whose every token depends on all tokens before it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        dtype="float32",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Run a daemon and connect to it."""
    directory: Path = tmp_path_factory.mktemp("kvlease")
    options = ["--runtime-dir", str(directory), "--no-listen-tcp", "--no-serve-grpc"]
    with subprocess.Popen([sys.executable, "-m", "kvleased", "serve", *options]) as daemon:
        with Client(f"unix://{directory}/kvlease.sock") as connected:
            yield connected
        daemon.terminate()


@pytest.fixture
def worker(client: Client, model: LlamaForCausalLM) -> Iterator[Worker]:
    """Attach to a cache that is new."""
    inputs = PlanInputs(
        model_config=model.config.to_json_string(),
        kv_dtype="float32",
        tokens_per_block=TOKENS_PER_BLOCK,
        device_blocks=DEVICE_BLOCKS,
        host_bytes=1 << 22,
        model_digest=model_digest(model),
    )
    with attached(client, inputs) as worker:
        yield worker


@contextmanager
def attached(client: Client, inputs: PlanInputs) -> Iterator[Worker]:
    """Attach to a cache that is new, which goes at the end."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            if client.register("tests", inputs).status == "ready":
                break
        except KVLeaseError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)
    with client.attach("tests") as worker:
        yield worker
    client.delete_cache("tests")


WINDOW_TOKENS = 24
"""A window that neither begins nor ends with a block."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(["sliding_attention", "full_attention"] * 2, id="windows and full layers"),
        pytest.param(["sliding_attention"] * 3, id="windows alone"),
    ],
)
def windowed(request: pytest.FixtureRequest) -> Gemma3ForCausalLM:
    """Build a small model with layers that look at a window only."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        dtype="float32",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=len(request.param),
        layer_types=request.param,
        sliding_window=WINDOW_TOKENS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.Gemma3ForCausalLM(config).eval()


@pytest.fixture
def window_worker(client: Client, windowed: Gemma3ForCausalLM) -> Iterator[Worker]:
    """Attach to a cache whose windows have room for two blocks of new tokens at once."""
    inputs = PlanInputs(
        model_config=windowed.config.to_json_string(),
        kv_dtype="float32",
        tokens_per_block=TOKENS_PER_BLOCK,
        device_blocks=2 * DEVICE_BLOCKS,
        null_blocks=1,
        host_bytes=1 << 22,
        longest_request_tokens=192,
        engine=EngineInputs(tokens_per_step=2 * TOKENS_PER_BLOCK),
        model_digest=model_digest(windowed),
    )
    with attached(client, inputs) as worker:
        yield worker


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Return random tokens; a longer prompt of the same seed begins with the shorter."""
    return np.random.default_rng(seed).integers(0, 512, num_tokens).tolist()


def plain(model: PreTrainedModel, token_ids: list[int]) -> list[int]:
    """Return what the model says without kvlease."""
    input_ids = torch.tensor([token_ids])
    output = model.generate(input_ids, max_new_tokens=NUM_NEW, do_sample=False)
    return output[0, len(token_ids) :].tolist()


def test_generate_over_leased_blocks_equals_plain(worker: Worker, model: LlamaForCausalLM) -> None:
    """Tokens are the same over leased blocks, on a miss as on a hit of all but the last block."""
    token_ids = prompt(100)

    miss = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="miss")
    hit = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="hit")

    assert list(miss.tokens) == list(hit.tokens) == plain(model, token_ids)
    assert (miss.device_hit_tokens, miss.computed_tokens) == (0, 100)
    assert (hit.device_hit_tokens, hit.computed_tokens) == (96, 4)


def test_prompt_may_be_a_tensor_and_not_a_batch(worker: Worker, model: LlamaForCausalLM) -> None:
    """What a tokenizer returns is taken row by row, and a batch is refused before anything is reserved."""
    batch = torch.tensor([prompt(40)])

    made = generate(model, worker, batch[0], max_new_tokens=4, request_id="tensor")

    assert list(made.tokens) == plain(model, prompt(40))[:4]
    with pytest.raises(InvalidError, match="one sequence"):
        generate(model, worker, batch, max_new_tokens=4, request_id="batch")


def test_prompt_of_full_blocks_computes_its_last_block(
    worker: Worker, model: LlamaForCausalLM
) -> None:
    """A prompt is never hit to its end, for its last token's logits are wanted."""
    token_ids = prompt(96)
    generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="miss")

    hit = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="hit")

    assert (hit.device_hit_tokens, hit.computed_tokens) == (80, 16)
    assert hit.recomputed_tokens == 0
    assert list(hit.tokens) == plain(model, token_ids)


def test_last_token_of_a_prompt_counts_as_computed(worker: Worker, model: LlamaForCausalLM) -> None:
    """Hits and computed tokens are the prompt's, also where all but one of them are hit."""
    token_ids = prompt(97)
    generate(model, worker, token_ids, max_new_tokens=1, request_id="miss")

    hit = generate(model, worker, token_ids, max_new_tokens=1, request_id="hit")

    assert (hit.device_hit_tokens, hit.computed_tokens) == (96, 1)


def test_generated_blocks_are_hit_by_a_longer_prompt(
    worker: Worker, model: LlamaForCausalLM
) -> None:
    """A conversation that goes on finds what was generated, not only what was asked."""
    token_ids = prompt(50)
    first = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="first")
    longer = [*token_ids, *first.tokens, *prompt(20, seed=1)]

    second = generate(model, worker, longer, max_new_tokens=NUM_NEW, request_id="second")

    assert second.device_hit_tokens == 80
    assert list(second.tokens) == plain(model, longer)


def test_model_generate_takes_a_leased_cache(worker: Worker, model: LlamaForCausalLM) -> None:
    """`model.generate` itself skips the hit prefix, extends the lease and says the same."""
    token_ids = prompt(100)
    input_ids = torch.tensor([token_ids])
    said: list[list[int]] = []

    for request_id, num_hit in (("miss", 0), ("hit", 96)):
        with LeasedCache.reserve(worker, token_ids, request_id=request_id) as cache:
            assert cache.get_seq_length() == num_hit
            output = model.generate(
                input_ids, **taking(model, cache), max_new_tokens=NUM_NEW, do_sample=False
            )
            cache.commit(output[0].tolist())
            said.append(output[0, len(token_ids) :].tolist())

    assert said == [plain(model, token_ids)] * 2


def test_assisted_decoding_says_the_same_or_is_refused(
    worker: Worker, model: LlamaForCausalLM
) -> None:
    """Transformers gives an assisted model the whole prompt, so over a hit it would say other tokens."""
    token_ids = prompt(100)
    input_ids = torch.tensor([token_ids])
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "prompt_lookup_num_tokens": 3}

    with LeasedCache.reserve(worker, token_ids, request_id="miss") as cache:
        output = model.generate(input_ids, **taking(model, cache), **options)
        cache.commit(output[0].tolist())
    with (
        LeasedCache.reserve(worker, token_ids, request_id="hit") as cache,
        pytest.raises(WrongStateError, match="the 96 tokens"),
    ):
        model.generate(input_ids, **taking(model, cache), **options)
    lease = worker.reserve("no keys", num_tokens=len(token_ids))
    lease.map()
    with LeasedCache(worker, lease) as cache:
        again = model.generate(input_ids, **taking(model, cache), **options)

    said = [tokens[0, len(token_ids) :].tolist() for tokens in (output, again)]
    assert said == [plain(model, token_ids)] * 2


def test_overwritten_pool_changes_tokens(worker: Worker, model: LlamaForCausalLM) -> None:
    """Attention reads the pool: a hit of blocks with other bytes says something else."""
    token_ids = prompt(100)
    said = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="before").tokens
    assert worker.device is not None
    pool = worker.device.view(np.float32)

    pool[:] = np.random.default_rng(0).standard_normal(len(pool), dtype=np.float32)
    after = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="after")

    assert after.device_hit_tokens == 96
    assert after.tokens != said


def test_evicted_and_reloaded_request_goes_on(worker: Worker, model: LlamaForCausalLM) -> None:
    """A request that was preempted, while another took its blocks, computes nothing again."""
    token_ids, other = prompt(100), prompt(200, seed=1)
    said: list[tuple[int, ...]] = []

    def preempt(cache: LeasedCache | None, num_new: int) -> None:
        if num_new == 10:
            assert cache is not None
            assert cache.evict() > 0
            said.append(
                generate(model, worker, other, max_new_tokens=NUM_NEW, request_id="other").tokens
            )
            assert cache.reload() == 109

    made = generate(
        model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="victim", on_step=preempt
    )

    assert (made.recomputes, made.computed_tokens) == (0, 100)
    assert list(made.tokens) == plain(model, token_ids)
    assert list(said[0]) == plain(model, other)


def test_prefix_comes_back_from_the_host_pool(
    client: Client, worker: Worker, model: LlamaForCausalLM
) -> None:
    """A prefix that was evicted counts as a host hit and holds the same bytes."""
    token_ids = prompt(100)
    generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="before")
    client.evict(cache="tests", num_blocks=DEVICE_BLOCKS)

    made = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="after")

    assert (made.device_hit_tokens, made.host_hit_tokens) == (0, 96)
    assert list(made.tokens) == plain(model, token_ids)


def test_lost_lease_costs_a_recomputation(worker: Worker, model: LlamaForCausalLM) -> None:
    """A lease that ends in the middle is replaced by another; the caller sees neither error nor other tokens."""
    token_ids = prompt(100)

    def lose(cache: LeasedCache | None, num_new: int) -> None:
        if num_new == 10:
            assert cache is not None
            cache.lease.release()

    made = generate(
        model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="lost", on_step=lose
    )

    assert made.recomputes == 1
    # The prefix is hit again, as far as it was committed before the loss.
    assert (made.device_hit_tokens, made.computed_tokens) == (0, 100)
    assert 0 < made.recomputed_tokens < 100 + NUM_NEW
    assert list(made.tokens) == plain(model, token_ids)


def test_one_request_id_used_twice_at_once_mixes_nothing(
    worker: Worker, model: LlamaForCausalLM
) -> None:
    """Two prompts that begin no block alike under one id have leases of their own, and commit what is theirs."""
    outer, inner = prompt(7, seed=2), prompt(7, seed=3)
    made: list[Generation] = []

    def ask_within(_: LeasedCache | None, num_new: int) -> None:
        if num_new == 2:
            made.append(generate(model, worker, inner, max_new_tokens=NUM_NEW, request_id="one id"))

    made.append(
        generate(
            model, worker, outer, max_new_tokens=NUM_NEW, request_id="one id", on_step=ask_within
        )
    )
    wanted = [plain(model, inner), plain(model, outer)]
    longer = [*outer, *wanted[1], 1]
    later = generate(model, worker, longer, max_new_tokens=NUM_NEW, request_id="later")

    assert [list(one.tokens) for one in made] == wanted
    assert later.device_hit_tokens
    assert list(later.tokens) == plain(model, longer)


def test_hits_are_those_of_the_first_lease(worker: Worker, model: LlamaForCausalLM) -> None:
    """However many leases a request needs, no prompt is told to have had more hits than tokens."""
    token_ids = prompt(100)
    generate(model, worker, token_ids, max_new_tokens=1, request_id="before")

    def lose(cache: LeasedCache | None, num_new: int) -> None:
        if cache is not None and num_new >= 10:
            cache.lease.release()

    made = generate(
        model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="lost", on_step=lose
    )

    assert (made.device_hit_tokens, made.host_hit_tokens, made.recomputes) == (96, 0, 3)
    assert made.computed_tokens == 4
    assert list(made.tokens) == plain(model, token_ids)


def test_request_beyond_the_pool_goes_on_without_it(
    worker: Worker, model: LlamaForCausalLM
) -> None:
    """What can never be leased is generated with memory of the worker's own."""
    token_ids = prompt((DEVICE_BLOCKS + 1) * TOKENS_PER_BLOCK)
    caches: list[LeasedCache | None] = []

    made = generate(
        model,
        worker,
        token_ids,
        max_new_tokens=NUM_NEW,
        request_id="large",
        on_step=lambda cache, _: caches.append(cache),
    )

    assert caches == [None] * NUM_NEW
    assert list(made.tokens) == plain(model, token_ids)
    assert (made.recomputes, made.computed_tokens) == (0, len(token_ids))


def test_cache_refuses_what_would_write_committed_blocks(
    worker: Worker, model: LlamaForCausalLM
) -> None:
    """Others may read committed blocks, so nothing takes the cache back before them."""
    token_ids = prompt(40)
    with LeasedCache.reserve(worker, token_ids, request_id="crop") as cache:
        model(torch.tensor([token_ids]), **taking(model, cache))
        cache.commit(token_ids)

        cache.crop(-8)

        assert (cache.get_seq_length(), cache.committed_tokens) == (32, 32)
        with pytest.raises(WrongStateError):
            cache.crop(-1)
        with pytest.raises(WrongStateError):
            cache.reset()


@pytest.mark.parametrize(
    ("change", "dtype", "resource"),
    [
        pytest.param({"num_hidden_layers": 2}, "float32", "layers", id="layers"),
        pytest.param({"num_key_value_heads": 4}, "float32", "heads", id="heads"),
        pytest.param({}, "bfloat16", None, id="dtype"),
    ],
)
def test_model_of_another_shape_is_refused(
    client: Client,
    model: LlamaForCausalLM,
    change: dict[str, int],
    dtype: str,
    resource: str | None,
) -> None:
    """A model that the cache was not planned for is told so, by what differs, and nothing is done without the cache."""
    config = transformers.LlamaConfig(**(model.config.to_dict() | change))
    other = transformers.LlamaForCausalLM(config).eval().to(getattr(torch, dtype))

    with attached(client, unnamed(model)) as worker, pytest.raises(InvalidError) as caught:
        generate(other, worker, prompt(20), max_new_tokens=3, request_id="other")

    assert caught.value.resource == resource
    assert resource is not None or "bfloat16" in caught.value.message


def test_model_of_other_weights_is_refused(worker: Worker, model: LlamaForCausalLM) -> None:
    """Two models of one config never share a prefix where the cache says for which it is."""
    other = transformers.LlamaForCausalLM(model.config).eval()

    with pytest.raises(InvalidError) as caught:
        generate(other, worker, prompt(20), max_new_tokens=3, request_id="other")
    with pytest.raises(InvalidError):
        LeasedCache.reserve(worker, prompt(20), request_id="other", model=other)

    assert (caught.value.resource, caught.value.rule) == ("model_digest", "other_model")


def test_cache_without_a_model_is_warned_of_once(
    client: Client, model: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache that does not say for which model it is serves any of that shape; the log says so, once."""
    # A layout that no other test warns of.
    with attached(client, replace(unnamed(model), tokens_per_block=4)) as worker:
        for request_id in ("one", "two"):
            generate(model, worker, prompt(20), max_new_tokens=3, request_id=request_id)

    assert [getattr(record, "action", "") for record in caplog.records] == ["model_unnamed"]


def unnamed(model: PreTrainedModel) -> PlanInputs:
    """Return the inputs of a cache that any model of that shape may use."""
    return PlanInputs(
        model_config=model.config.to_json_string(),
        kv_dtype="float32",
        tokens_per_block=TOKENS_PER_BLOCK,
        device_blocks=DEVICE_BLOCKS,
    )


def test_digest_of_a_model_follows_its_weights(model: LlamaForCausalLM) -> None:
    """Equal models have equal digests; one whose weights change has another."""
    twin = transformers.LlamaForCausalLM(model.config).eval()
    before = model_digest(twin)
    twin.load_state_dict(model.state_dict())
    loaded = model_digest(twin)
    with torch.no_grad():
        twin.lm_head.weight.mul_(1.5)

    assert before != loaded == model_digest(model)
    assert model_digest(twin) not in (before, loaded)


def test_commit_refuses_layers_that_were_not_written(
    client: Client, model: LlamaForCausalLM
) -> None:
    """No block becomes findable in which a model of fewer layers left some as they were."""
    config = transformers.LlamaConfig(**(model.config.to_dict() | {"num_hidden_layers": 2}))
    other = transformers.LlamaForCausalLM(config).eval()
    token_ids = prompt(40)
    with (
        attached(client, unnamed(model)) as worker,
        LeasedCache.reserve(worker, token_ids, request_id="layers") as cache,
    ):
        other(torch.tensor([token_ids]), **taking(other, cache))

        with pytest.raises(WrongStateError) as caught:
            cache.commit(token_ids)

    assert (caught.value.need, caught.value.available) == (3, 2)


def test_cache_refuses_a_batch(worker: Worker, model: LlamaForCausalLM) -> None:
    """A lease holds one sequence, so a batch of two is refused before anything is written."""
    token_ids = prompt(20)
    with LeasedCache.reserve(worker, token_ids, request_id="batch") as cache:
        with pytest.raises(InvalidError):
            model(torch.tensor([token_ids, token_ids]), **taking(model, cache))

        assert cache.get_seq_length() == 0


def test_windows_are_served_from_the_pool(
    window_worker: Worker, windowed: Gemma3ForCausalLM
) -> None:
    """Tokens are the same where layers keep a window: a prompt that does not fit into it at once, and a hit."""
    token_ids = prompt(100)

    miss = generate(windowed, window_worker, token_ids, max_new_tokens=NUM_NEW, request_id="miss")
    hit = generate(windowed, window_worker, token_ids, max_new_tokens=NUM_NEW, request_id="hit")

    assert list(miss.tokens) == list(hit.tokens) == plain(windowed, token_ids)
    assert (miss.recomputes, miss.computed_tokens) == (0, 100)
    assert (hit.device_hit_tokens, hit.computed_tokens) == (96, 4)


def test_windows_give_their_blocks_back(window_worker: Worker, windowed: Gemma3ForCausalLM) -> None:
    """A group of windows never holds more than its window and what is computed at once."""
    held: list[int] = []

    def count(cache: LeasedCache | None, _: int) -> None:
        assert cache is not None
        held.append(int(np.count_nonzero(cache.lease.blocks(0))))

    generate(
        windowed, window_worker, prompt(100), max_new_tokens=NUM_NEW, request_id="r", on_step=count
    )

    assert window_worker.plan.groups[0].spec.kind == "sliding_window"
    assert max(held) <= window_worker.plan.groups[0].blocks_per_longest_request
    assert held[-1] <= 3


def test_evicted_windows_come_back(window_worker: Worker, windowed: Gemma3ForCausalLM) -> None:
    """A request with windows that was preempted goes on from what came back."""
    token_ids = prompt(100)

    def preempt(cache: LeasedCache | None, num_new: int) -> None:
        if num_new == 10:
            assert cache is not None
            assert cache.evict() > 0
            cache.reload()

    made = generate(
        windowed,
        window_worker,
        token_ids,
        max_new_tokens=NUM_NEW,
        request_id="victim",
        on_step=preempt,
    )

    assert (made.recomputes, list(made.tokens)) == (0, plain(windowed, token_ids))


def test_windows_of_a_conversation_come_back(
    client: Client, window_worker: Worker, windowed: Gemma3ForCausalLM
) -> None:
    """A second turn goes on from the first one's blocks, down to the host pool and up again, and is preempted, too."""
    token_ids = prompt(100)
    first = generate(windowed, window_worker, token_ids, max_new_tokens=NUM_NEW, request_id="first")
    longer = [*token_ids, *first.tokens, *prompt(12, seed=1)]
    evicted = client.evict(cache="tests", num_blocks=2 * DEVICE_BLOCKS)

    def preempt(cache: LeasedCache | None, num_new: int) -> None:
        if num_new == 10:
            assert cache is not None
            assert window_worker.device is not None
            assert cache.evict() > 0
            # What was the lease's is anybody's now.
            window_worker.device[window_worker.plan.bytes_per_block :] = 0xEE
            cache.reload()

    second = generate(
        windowed,
        window_worker,
        longer,
        max_new_tokens=NUM_NEW,
        request_id="second",
        on_step=preempt,
    )

    assert evicted.num_offloaded > 0
    assert (second.device_hit_tokens + second.host_hit_tokens, second.recomputes) == (128, 0)
    assert second.host_hit_tokens > 0
    assert list(second.tokens) == plain(windowed, longer)


def test_prompt_beyond_its_windows_is_refused_in_one_piece(
    window_worker: Worker, windowed: Gemma3ForCausalLM
) -> None:
    """Who computes a prompt by himself is told how many tokens there is room for before a commit."""
    token_ids = prompt(100)
    with LeasedCache.reserve(window_worker, token_ids, request_id="r") as cache:
        with pytest.raises(WrongStateError) as caught:
            windowed(torch.tensor([token_ids]), **taking(windowed, cache))
        assert (caught.value.need, caught.value.available) == (100, 80)

        windowed(torch.tensor([token_ids[:80]]), **taking(windowed, cache))
        cache.commit(token_ids)
        windowed(torch.tensor([token_ids[80:]]), **taking(windowed, cache))

        assert cache.get_seq_length() == 100
