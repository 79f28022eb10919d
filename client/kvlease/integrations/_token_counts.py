"""Own the counts of what becomes of a request's tokens; the tokens themselves are the greedy loop's."""

from __future__ import annotations


class TokenCounts:
    """The token counts of one request, over all leases that it tries: each prompt token is either a hit or computed."""

    def __init__(self, num_prompt: int) -> None:
        """Begin with the number of prompt tokens."""
        self._num_prompt = num_prompt
        self._num_known = 0
        """Tokens from the start that were hit or computed, under any lease."""
        self.device_hits = 0
        self.host_hits = 0
        self.store_hits = 0
        self.computed = 0
        """Prompt tokens that were computed; each counts once."""
        self.recomputed = 0
        """Tokens that were computed although they were known before; they count each time."""

    def __repr__(self) -> str:
        """Show life."""
        hits = self.device_hits + self.host_hits + self.store_hits
        return f"<TokenCounts {hits} hit, {self.computed} computed, {self.recomputed} again>"

    def hit(self, num_hit: int, num_from_device: int, num_from_host: int) -> None:
        """Count the prefix of a fresh lease, less the tokens that are known already.

        Tokens that are neither from the device nor from the host are from a store. A lease does not tell which of its
        tokens comes from which tier, so the new tokens of a later lease count for the lowest tiers first.
        """
        fresh = max(0, num_hit - self._num_known)
        fresh_of_stores = min(fresh, num_hit - num_from_device - num_from_host)
        fresh_of_host = min(fresh - fresh_of_stores, num_from_host)
        self.store_hits += fresh_of_stores
        self.host_hits += fresh_of_host
        self.device_hits += fresh - fresh_of_stores - fresh_of_host
        self._num_known += fresh

    def compute(self, num_present: int, num_tokens: int) -> None:
        """Count the tokens from `num_present` to `num_tokens`, whose states were computed just now."""
        self.recomputed += max(0, min(num_tokens, self._num_known) - num_present)
        self.computed += max(0, min(num_tokens, self._num_prompt) - self._num_known)
        self._num_known = max(self._num_known, num_tokens)
