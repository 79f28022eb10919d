"""Own the laws of token counts: a prompt's tokens are its hits and those computed, whatever was lost."""

from kvlease.integrations._token_counts import TokenCounts

NUM_PROMPT = 100


def test_prompt_is_what_was_hit_and_what_was_computed() -> None:
    """Each token of the prompt counts once, even if only one is left; generated tokens do not count."""
    counts = TokenCounts(NUM_PROMPT)

    counts.hit(99, 48, 32)
    counts.compute(99, 100)
    counts.compute(100, 101)

    assert (counts.device_hits, counts.host_hits, counts.store_hits) == (48, 32, 19)
    assert (counts.computed, counts.recomputed) == (1, 0)


def test_tokens_computed_after_a_loss_are_counted_apart() -> None:
    """Tokens that were hit, computed or generated before and are computed again do not count as another prompt."""
    counts = TokenCounts(NUM_PROMPT)
    counts.hit(48, 48, 0)
    counts.compute(48, 100)
    counts.compute(100, 101)

    counts.hit(64, 64, 0)
    counts.compute(64, 102)

    assert (counts.device_hits, counts.computed, counts.recomputed) == (48, 52, 101 - 64)


def test_longer_prefix_of_a_later_lease_is_a_hit() -> None:
    """Tokens that others computed meanwhile are hits and no computed tokens; they count as the lowest tier's."""
    counts = TokenCounts(NUM_PROMPT)
    counts.hit(16, 16, 0)
    counts.compute(16, 32)

    counts.hit(96, 48, 40)
    counts.compute(96, 100)

    assert (counts.device_hits, counts.host_hits, counts.store_hits) == (16 + 16, 40, 8)
    assert (counts.computed, counts.recomputed) == (16 + 4, 0)
