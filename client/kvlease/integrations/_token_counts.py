"""Own the count of what became of a request's tokens; which those are, and what computes them, is others' business."""

from __future__ import annotations


class TokenCounts:
    """The tokens of one request, over all leases that it is tried with: a prompt's are those hit and those computed."""

    def __init__(self, num_prompt: int) -> None:
        """Take how many tokens the prompt has."""
        self._num_prompt = num_prompt
        self._num_known = 0
        """Tokens from the start that were hit or computed, in whatever lease that was."""
        self.device_hits = 0
        self.host_hits = 0
        self.store_hits = 0
        self.computed = 0
        """Of the prompt, each once."""
        self.recomputed = 0
        """Computed although they were there before, each time."""

    def __repr__(self) -> str:
        """Show life."""
        hits = self.device_hits + self.host_hits + self.store_hits
        return f"<TokenCounts {hits} hit, {self.computed} computed, {self.recomputed} again>"

    def hit(self, num_hit: int, num_from_device: int, num_from_host: int) -> None:
        """Count the prefix of a fresh lease, less what was known; what is from neither tier is from a store.

        A lease does not tell which of its tokens is from where; of a later one the new ones count as the lowest tiers'.
        """
        fresh = max(0, num_hit - self._num_known)
        fresh_of_stores = min(fresh, num_hit - num_from_device - num_from_host)
        fresh_of_host = min(fresh - fresh_of_stores, num_from_host)
        self.store_hits += fresh_of_stores
        self.host_hits += fresh_of_host
        self.device_hits += fresh - fresh_of_stores - fresh_of_host
        self._num_known += fresh

    def compute(self, num_present: int, num_tokens: int) -> None:
        """Count the tokens from one number of them to the other, whose states were computed just now."""
        self.recomputed += max(0, min(num_tokens, self._num_known) - num_present)
        self.computed += max(0, min(num_tokens, self._num_prompt) - self._num_known)
        self._num_known = max(self._num_known, num_tokens)
