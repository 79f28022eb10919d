"""Prove that window layers give the same tokens over leased blocks, and return blocks behind the window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvlease import Client  # noqa: E402
from kvlease.errors import WrongStateError  # noqa: E402
from kvlease.integrations.transformers import (  # noqa: E402
    LeasedCache,
    generate,
)
from tests.integrations.transformers.leasing import (  # noqa: E402
    DEVICE_BLOCKS,
    NUM_NEW,
    plain,
    prompt,
    taking,
)

if TYPE_CHECKING:
    from transformers import Gemma3ForCausalLM

    from kvlease import Worker

pytestmark = pytest.mark.acceptance


def test_windows_are_served_from_the_pool(
    window_worker: Worker, windowed: Gemma3ForCausalLM
) -> None:
    """Window layers give the same tokens for a prompt longer than the window, and for a hit."""
    token_ids = prompt(100)

    miss = generate(windowed, window_worker, token_ids, max_new_tokens=NUM_NEW, request_id="miss")
    hit = generate(windowed, window_worker, token_ids, max_new_tokens=NUM_NEW, request_id="hit")

    assert list(miss.tokens) == list(hit.tokens) == plain(windowed, token_ids)
    assert (miss.recomputes, miss.computed_tokens) == (0, 100)
    assert (hit.device_hit_tokens, hit.computed_tokens) == (96, 4)


def test_windows_give_their_blocks_back(window_worker: Worker, windowed: Gemma3ForCausalLM) -> None:
    """A window group never holds more than its window and the tokens computed at once."""
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
    """A preempted request with windows goes on from its reloaded blocks."""
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
    """A second turn goes on from the first one's blocks, also after they went to the host pool and after preemption."""
    token_ids = prompt(100)
    first = generate(windowed, window_worker, token_ids, max_new_tokens=NUM_NEW, request_id="first")
    longer = [*token_ids, *first.tokens, *prompt(12, seed=1)]
    evicted = client.evict(cache="tests", num_blocks=2 * DEVICE_BLOCKS)

    def preempt(cache: LeasedCache | None, num_new: int) -> None:
        if num_new == 10:
            assert cache is not None
            assert window_worker.device is not None
            assert cache.evict() > 0
            # The lease's blocks now belong to nobody.
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
    """A prompt longer than its windows is refused in one piece, with the number of tokens that fit before a commit."""
    token_ids = prompt(100)
    with LeasedCache.reserve(window_worker, token_ids, request_id="r") as cache:
        with pytest.raises(WrongStateError) as caught:
            windowed(torch.tensor([token_ids]), **taking(windowed, cache))
        assert (caught.value.need, caught.value.available) == (100, 80)

        windowed(torch.tensor([token_ids[:80]]), **taking(windowed, cache))
        cache.commit(token_ids)
        windowed(torch.tensor([token_ids[80:]]), **taking(windowed, cache))

        assert cache.get_seq_length() == 100
