"""Prove that a model generates the same tokens with leased blocks as without, whatever happens to its lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvlease import Client  # noqa: E402
from kvlease.errors import InvalidError, WrongStateError  # noqa: E402
from kvlease.integrations.transformers import (  # noqa: E402
    Generation,
    LeasedCache,
    generate,
)
from tests.integrations.transformers.leasing import (  # noqa: E402
    DEVICE_BLOCKS,
    NUM_NEW,
    TOKENS_PER_BLOCK,
    plain,
    prompt,
    taking,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from kvlease import Worker

pytestmark = pytest.mark.acceptance


def test_generate_over_leased_blocks_equals_plain(worker: Worker, model: LlamaForCausalLM) -> None:
    """Tokens over leased blocks equal plain ones, on a miss and on a hit of all but the last block."""
    token_ids = prompt(100)

    miss = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="miss")
    hit = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="hit")

    assert list(miss.tokens) == list(hit.tokens) == plain(model, token_ids)
    assert (miss.device_hit_tokens, miss.computed_tokens) == (0, 100)
    assert (hit.device_hit_tokens, hit.computed_tokens) == (96, 4)


def test_prompt_may_be_a_tensor_and_not_a_batch(worker: Worker, model: LlamaForCausalLM) -> None:
    """A row of a tokenizer's tensor is taken as a prompt; a batch is refused before anything is reserved."""
    batch = torch.tensor([prompt(40)])

    made = generate(model, worker, batch[0], max_new_tokens=4, request_id="tensor")

    assert list(made.tokens) == plain(model, prompt(40))[:4]
    with pytest.raises(InvalidError, match="one sequence"):
        generate(model, worker, batch, max_new_tokens=4, request_id="batch")


def test_prompt_of_full_blocks_computes_its_last_block(
    worker: Worker, model: LlamaForCausalLM
) -> None:
    """A prompt is never hit to its end, because its last token's logits are needed."""
    token_ids = prompt(96)
    generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="miss")

    hit = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="hit")

    assert (hit.device_hit_tokens, hit.computed_tokens) == (80, 16)
    assert hit.recomputed_tokens == 0
    assert list(hit.tokens) == plain(model, token_ids)


def test_last_token_of_a_prompt_counts_as_computed(worker: Worker, model: LlamaForCausalLM) -> None:
    """Hit and computed tokens add up to the prompt's, also if all but one are hits."""
    token_ids = prompt(97)
    generate(model, worker, token_ids, max_new_tokens=1, request_id="miss")

    hit = generate(model, worker, token_ids, max_new_tokens=1, request_id="hit")

    assert (hit.device_hit_tokens, hit.computed_tokens) == (96, 1)


def test_generated_blocks_are_hit_by_a_longer_prompt(
    worker: Worker, model: LlamaForCausalLM
) -> None:
    """The next turn of a conversation hits the generated blocks, not only the prompt's."""
    token_ids = prompt(50)
    first = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="first")
    longer = [*token_ids, *first.tokens, *prompt(20, seed=1)]

    second = generate(model, worker, longer, max_new_tokens=NUM_NEW, request_id="second")

    assert second.device_hit_tokens == 80
    assert list(second.tokens) == plain(model, longer)


def test_model_generate_takes_a_leased_cache(worker: Worker, model: LlamaForCausalLM) -> None:
    """`model.generate` itself skips the hit prefix, extends the lease and generates the same tokens."""
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
    """An assisted model gets the whole prompt, so a hit, which would change its tokens, is refused."""
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
    """Attention reads the pool: a hit of blocks with changed bytes changes the tokens."""
    token_ids = prompt(100)
    said = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="before").tokens
    assert worker.device is not None
    pool = worker.device.view(np.float32)

    pool[:] = np.random.default_rng(0).standard_normal(len(pool), dtype=np.float32)
    after = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="after")

    assert after.device_hit_tokens == 96
    assert after.tokens != said


def test_evicted_and_reloaded_request_goes_on(worker: Worker, model: LlamaForCausalLM) -> None:
    """A preempted request whose blocks another has taken recomputes nothing."""
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
    """An evicted prefix counts as a host hit and has the same bytes."""
    token_ids = prompt(100)
    generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="before")
    client.evict(cache="tests", num_blocks=DEVICE_BLOCKS)

    made = generate(model, worker, token_ids, max_new_tokens=NUM_NEW, request_id="after")

    assert (made.device_hit_tokens, made.host_hit_tokens) == (0, 96)
    assert list(made.tokens) == plain(model, token_ids)


def test_lost_lease_costs_a_recomputation(worker: Worker, model: LlamaForCausalLM) -> None:
    """A lease that ends early is replaced by another, and the caller sees neither an error nor other tokens."""
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
    """Two prompts under one id, without a common block, have a lease each and commit their own blocks."""
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
    """However many leases a request needs, it never reports more hits than its prompt has tokens."""
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
    """A request that can never be leased is generated in memory of the worker's own."""
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
    """A cache refuses to be cut back into committed blocks, which others may read."""
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
