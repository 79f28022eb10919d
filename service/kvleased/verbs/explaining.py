"""Own how the reasons of misses are told: in numbers, and in one sentence that says what to change."""

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

from kvlease.groups import Keeps
from kvlease.ids import LeaseId
from kvlease.plan_groups import why_no_prefix
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.entries import CacheEntry, WorkerEntry
from kvleased.caches.registry import Registry
from kvleased.calls.idempotency import Answer
from kvleased.core import commands as c
from kvleased.core import effects as e
from kvleased.core.effects import Missed, MissReason, Tier
from kvleased.core.shape import WritePolicy
from kvleased.core.untold import Silence
from kvleased.core.verbs.asking import LABELS_MAX
from kvleased.verbs.runner import Respond

Run = Callable[[CacheEntry, c.Command, Respond], Answer]
"""Gives a command to a core."""

AddMisses = Callable[[pb.ReserveResponse, e.Reserved], pb.ReserveResponse]
"""Adds the misses of a grant to the response."""

ANOTHER_TENANT: Final = "another tenant"
"""What workers are told instead of another tenant's name."""
_SECONDS_SHOWN_MIN: Final = 0.1
_SPANS: Final = (("d", 86_400), ("h", 3_600), ("min", 60))
_BELOW: Final = (
    "they left the device{left}, and a lower tier has them; reserve with a wait_ms, or a longer "
    "one, to load them"
)
"""The sentence of blocks that a call which waits would get."""
_LEFT: Final = (MissReason.CLEARED, MissReason.RESIZED, MissReason.STORE_LOST)
"""Reasons that do not matter if a lower tier has the blocks."""
_SENTENCES: Final = {
    MissReason.CLEARED: "a clear took them from the {tier} tier{ago}; compute them again",
    MissReason.RESIZED: (
        "a resize took them from the {tier} tier{ago}; a larger {tier} tier would keep them"
    ),
    MissReason.STORE_LOST: (
        "the {tier} store was lost or replaced{ago}, and they with it; compute them again"
    ),
    MissReason.DROPPED: (
        "the {tier} tier had them, but they could not be copied from there; compute them again"
    ),
    MissReason.CHECKSUM: (
        "their bytes in the {tier} tier did not match their checksum and were thrown "
        "away{ago}; compute them again"
    ),
    MissReason.TIER_OFF: (
        "the {tier} tier had them, but did not work then; kvlease caches says whether it works now"
    ),
    MissReason.OTHER_TENANT: (
        "another tenant's blocks have these keys; derive keys from your own tenant's key"
    ),
    MissReason.BEHIND_A_MISS: (
        "they are cached, but a prefix ends at the first block that is missing; see the run before this one"
    ),
    MissReason.SHORTER_THAN_A_BLOCK: (
        "the last {tokens} cannot fill a block of {block_tokens} tokens, and only full blocks are kept"
    ),
}
"""The sentences of the reasons that only need numbers filled in."""
_SILENCES: Final = {
    None: "",
    Silence.OFF: "; the remote store may have them, but did not work then; kvlease caches says whether it works now",
    Silence.UNANSWERED: (
        "; the remote store may have them, but did not answer this call; kvlease caches says whether it works"
    ),
    Silence.UNASKED: (
        f"; the remote store may have them, but a call asks it for {LABELS_MAX:,} blocks at most; with those before "
        "them on the node, a later call asks for these"
    ),
    Silence.NO_WAIT: "; the remote store may have them; reserve with a wait_ms to ask it",
}
"""What a sentence adds about the remote store."""


def explain(registry: Registry, run: Run, caller: Caller, cache: str, lease_id: LeaseId) -> Answer:
    """Tell why the rest of a lease's prefix was not found; a worker may ask for its own leases, an operator for any."""
    worker = registry.worker(caller.token) if caller.token else None
    entry = registry.cache(cache) if cache else registry.cache_of(caller)
    command = c.Explain(worker_id=None if worker is None else worker.worker_id, lease_id=lease_id)
    return run(entry, command, Explainer(registry, entry, worker).explained)


class Explainer:
    """Tells one caller about the misses in one cache."""

    def __init__(self, registry: Registry, entry: CacheEntry, worker: WorkerEntry | None) -> None:
        """Remember the caller: a worker, or None for an operator, who may know the names of all tenants."""
        self._registry = registry
        self._entry = entry
        self._worker = worker

    def add_misses(self, response: pb.ReserveResponse, reply: e.Reserved) -> pb.ReserveResponse:
        """Add to the response to a reserve what was not found."""
        if reply.misses:
            response.misses.extend(self._misses(reply.misses))
        return response

    def explained(self, reply: e.Explained) -> pb.ExplainResponse:
        """Return the response to an explain."""
        return pb.ExplainResponse(
            lease_id=reply.lease_id,
            num_tokens=reply.num_tokens,
            hit_tokens={tier.value: count for tier, count in reply.hit_tokens.items()},
            misses=self._misses(reply.misses),
        )

    def _misses(self, misses: tuple[Missed, ...]) -> list[pb.Miss]:
        now, names = monotonic(), self._registry.tenant_names()
        return [self._miss(miss, now, names) for miss in misses]

    def _miss(self, miss: Missed, now: float, names: Mapping[int, str]) -> pb.Miss:
        tenant = self._tenant(miss.tenant, names) if miss.tenant else ""
        last = miss.last_left_at
        return pb.Miss(
            first_block=miss.first_block,
            num_blocks=miss.num_blocks,
            reason=miss.reason.value,
            tier="" if miss.tier is None else miss.tier.value,
            policy=miss.policy,
            tenant=tenant,
            age_ms=None if last is None else max(0, int((now - last) * 1000)),
            why=self._where(miss)
            + _why(miss, now, tenant, self._entry)
            + _SILENCES[miss.remote_silence]
            + _left_out(miss),
        )

    def _tenant(self, digest: int, names: Mapping[int, str]) -> str:
        worker = self._worker
        if worker is not None and digest != worker.tenant_digest:
            return ANOTHER_TENANT
        return names.get(digest, f"{digest:016x}")

    def _where(self, miss: Missed) -> str:
        has_groups = len(self._entry.plan.groups) > 1
        is_of_one = miss.reason not in (MissReason.BEHIND_A_MISS, MissReason.SHORTER_THAN_A_BLOCK)
        finds_some = self._entry.core.shape.shares_prefixes
        return f"in table group {miss.group}: " if has_groups and is_of_one and finds_some else ""


def _why(miss: Missed, now: float, tenant: str, entry: CacheEntry) -> str:
    """Return what happened, and what to change."""
    if miss.reason is MissReason.EVICTED:
        return _evicted(miss, now, tenant, entry)
    if miss.reason is MissReason.NEVER_COMMITTED:
        return _never(miss, now, entry)
    if miss.is_below and miss.reason in _LEFT:
        return _BELOW.format(left=_ago(miss, now))
    return _SENTENCES[miss.reason].format(
        tier="" if miss.tier is None else miss.tier.value,
        ago=_ago(miss, now),
        tokens=_count(miss.num_tokens, "token"),
        block_tokens=entry.core.shape.hit_tokens,
    )


def _evicted(miss: Missed, now: float, tenant: str, entry: CacheEntry) -> str:
    has_host = entry.plan.num_slots > 0
    left = f"{_ago(miss, now)} to make room for {tenant}" if tenant else _ago(miss, now)
    if miss.is_below:
        return _BELOW.format(left=left)
    if miss.tier is not Tier.DEVICE:
        assert miss.tier is not None, "what was evicted was somewhere"
        tier = miss.tier.value
        return (
            f"{miss.policy} chose them for eviction{left} when the {tier} tier was full; a larger {tier} tier would "
            "keep them"
        )
    if not miss.policy:
        kept = (
            "with wait_ms, a call copies them to the host pool first"
            if has_host
            else "a host pool would keep what a call evicts"
        )
        return f"an evict call, or an engine through its magazine, took them off the device{left}; {kept}"
    kept = "a larger device pool or a higher priority would keep them longer"
    also = (
        f"a call with wait_ms would copy {_copied(entry)} to the host pool first"
        if has_host
        else "so would a host pool"
    )
    return f"{miss.policy} chose them for eviction{left}; {kept}, and {also}"


def _copied(entry: CacheEntry) -> str:
    """Return which blocks the write policy copies before they leave."""
    shape = entry.core.shape
    if shape.write_policy is not WritePolicy.AFTER_N_HITS:
        return "them"
    return f"blocks that were found {_count(shape.write_after_hits, 'time')}"


def _never(miss: Missed, now: float, entry: CacheEntry) -> str:
    if reason := why_no_prefix(entry.plan):
        return f"this cache finds no prefix, whatever keys are sent, because {reason}"
    shape, committed = entry.core.shape, "committed"
    if shape.groups[miss.group].keeps is Keeps.STATE:
        committed = (
            "committed by a request whose reserve or extend ended there, because only such states are kept (end a "
            f"reserve or extend at a multiple of {shape.hit_tokens} tokens)"
        )
    others = f"never {committed}, or only under another salt, adapter, tenant or layout, which gives different keys"
    anew = entry.recovered_at
    began = "it was registered" if anew is None else f"the daemon restarted{_span(now - anew)} ago"
    if miss.remembered_since is None:
        return f"no block has left this cache since {began}, so these blocks were gone before that, or {others}"
    gone = "that" if anew is None else began
    return (
        f"none of the last {_count(miss.num_remembered, 'block')} that left, the first of them"
        f"{_span(now - miss.remembered_since)} ago, has these keys; they were gone before {gone}, or {others}"
    )


def _left_out(miss: Missed) -> str:
    if not miss.num_runs_left_out:
        return ""
    return (
        f"; {_count(miss.num_runs_left_out, 'further run')} of "
        f"{_count(miss.num_blocks_left_out, 'block')} not shown"
    )


def _ago(miss: Missed, now: float) -> str:
    """Return how long ago blocks left, with a space before it; empty if that is not known."""
    if miss.first_left_at is None or miss.last_left_at is None:
        return ""
    first, last = _span(now - miss.first_left_at), _span(now - miss.last_left_at)
    return f"{last} ago" if first == last else f"{first} to{last} ago"


def _span(seconds: float) -> str:
    """Return a span of time in the largest unit that fits, with a space before it."""
    for unit, length in _SPANS:
        if seconds >= length:
            return f" {int(seconds // length)} {unit}"
    return (
        f" {seconds:.1f} s" if seconds >= _SECONDS_SHOWN_MIN else f" under {_SECONDS_SHOWN_MIN} s"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
