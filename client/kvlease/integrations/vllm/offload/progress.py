"""Own which of a step's requests have a chunk to store; vLLM decides what is stored of it.

In every step vLLM goes over every request to find those that have reached the end of a chunk. Most have not: a request
that generates gets there once in as many steps as a chunk has tokens. A request that is still in the chunk in which
vLLM last looked at it has nothing more to store, so it can be left out.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import gcd
from typing import Any


class Progress:
    """How far each request had come, in chunks, when vLLM last went over it."""

    def __init__(self, tokens_per_chunk: Sequence[int]) -> None:
        """Begin with no requests; chunks of several groups may differ in their tokens."""
        self._tokens = gcd(*tokens_per_chunk)
        self._requests: dict[str, Any] = {}
        self._chunks: dict[str, int] = {}

    def __repr__(self) -> str:
        """Show life: how many requests there are."""
        return f"<Progress {len(self._requests)} requests, chunks of {self._tokens} tokens>"

    def note(self, request: Any) -> None:
        """Note a request, whose token counts are read from now on."""
        self._requests[request.request_id] = request
        self._chunks.pop(request.request_id, None)

    def due(
        self, num_scheduled_tokens: Mapping[str, int], put_off: Collection[str] = ()
    ) -> dict[str, int]:
        """Return those of a step's requests that reach another chunk, and those that were never noted.

        Requests in `put_off` are due in their next step, whatever that brings. Tokens that are scheduled ahead do not
        count: vLLM does not store them before it knows them.
        """
        requests, chunks, tokens_per_chunk = self._requests, self._chunks, self._tokens
        found: dict[str, int] = {}
        for request_id, num_tokens in num_scheduled_tokens.items():
            if put_off and request_id in put_off:
                chunks.pop(request_id, None)
                continue
            request = requests.get(request_id)
            if request is not None:
                tokens = min(request.num_computed_tokens + num_tokens, request.num_tokens)
                at = tokens // tokens_per_chunk
                if chunks.get(request_id) == at:
                    continue
                chunks[request_id] = at
            found[request_id] = num_tokens
        return found

    def restart(self) -> None:
        """Let vLLM go over all requests again: the cache was reset, and everything is stored anew."""
        self._chunks.clear()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._chunks.pop(request_id, None)
