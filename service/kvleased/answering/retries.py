"""Own the calls that carry an idempotency key: whose keys they are, and when a retry gets the answer of the first try.

How replies are kept is in `calls.idempotency`.
"""

from typing import Final

from google.protobuf.message import Message

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.registry import Registry
from kvleased.calls import checks
from kvleased.calls.idempotency import KEY_CHARACTERS_MAX, Answer, Replies, digest_of
from kvleased.verbs.runner import Verb

_KNOWN_BY_REQUEST: Final = frozenset({"reserve", "fork"})
"""Verbs that name a request. The core knows it again, so a retry is told what it has now: since the first answer its
lease may have ended, or its blocks may have moved, and others may have those of that answer."""

_Unremembered = tuple[Replies, str, Message, Caller, int, Message]
"""A reply that is to be remembered: the caller's replies, verb, request, caller, salt, and the reply."""


class Retries:
    """The calls with an idempotency key, each of which is carried out once."""

    def __init__(self, registry: Registry, max_replies: int) -> None:
        """Remember up to `max_replies` for all operators; each worker's replies are remembered with the worker."""
        self._registry = registry
        self._operator_replies = Replies(max_replies)
        self.left: list[_Unremembered] = []
        """Replies that `settle` will remember."""

    def answer(self, verb: str, carry_out: Verb, request: Message, caller: Caller) -> Answer:
        """Carry a call out, or answer it as the same call was answered before.

        Raises:
            InvalidError: the key is malformed.
            IdReusedError: the key was used for another body, or another cache.
            KVLeaseError: the call is refused; refusals are not remembered.
        """
        key = caller.idempotency_key
        check_key(key)
        if caller.token:
            replies, salt = self._registry.worker(caller.token).replies, 0
        else:
            # Two processes that pick the same key must not become one worker.
            replies, salt = self._operator_replies, caller.peer_pid if verb == "attach" else 0
        if verb == "attach":
            if caller.peer_pid <= 0:
                # The kernel does not name the caller, so any other process could pick the same key.
                return carry_out(request, caller)
            self._forget_if_ended(replies, key)
        if (verb, key) in replies.names:
            answer = replies.recall(verb, key, digest_of(request, caller.cache, salt))
            if verb not in _KNOWN_BY_REQUEST or not isinstance(answer, Message):
                return answer
        answer = carry_out(request, caller)
        if isinstance(answer, Message):
            self.left.append((replies, verb, request, caller, salt, answer))
            return answer
        return replies.promise(verb, key, digest_of(request, caller.cache, salt), answer)

    def settle(self) -> None:
        """Remember the last replies; their callers need not wait for that."""
        while self.left:
            replies, verb, request, caller, salt, answer = self.left.pop()
            digest = digest_of(request, caller.cache, salt)
            replies.remember(verb, caller.idempotency_key, digest, answer)

    def _forget_if_ended(self, replies: Replies, key: str) -> None:
        """Forget the reply to an attach if the worker that it made has ended."""
        name = ("attach", key)
        answer = replies.known(name)
        if isinstance(answer, pb.AttachResponse) and answer.token not in self._registry.by_token:
            replies.forget(name)


def check_key(key: str) -> None:
    """Refuse a malformed idempotency key; an empty one is none."""
    if len(key) > KEY_CHARACTERS_MAX or not key.isprintable():
        checks.request_id(key, "idempotency_key")
