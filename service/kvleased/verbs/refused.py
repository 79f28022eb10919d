"""Own the counts of refused calls for people: by cache, verb, code and reason, each with what to do about it.

A refusal by a cache has the same reason as in its metric; a refusal before any cache was asked has none.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from kvlease.errors import (
    BY_CODE,
    DeadlineError,
    NeverFitsError,
    PoolFullError,
    UnknownWorkerError,
)
from kvleased.caches.tallies import OTHER, Tally
from kvleased.core.reasons import Reason
from kvleased.core.tenancy.tenants import TENANT_BLOCKS

Codes = Mapping[tuple[str, str, str], int]
"""Answered calls by verb, transport and code, which is "OK" or an error's."""

ADVICE: Final[Mapping[str, str]] = {
    Reason.BLOCKS.value: "The blocks are held, or there are too few. See who holds them (kvlease leases, pins, "
    "tenants); register a larger pool, or let the engine run fewer requests.",
    Reason.COPIES.value: "Enough blocks will be free, but some are still being copied or zeroed. Let callers wait "
    "(wait_ms); see how much the movers have to do.",
    Reason.POSITION.value: (
        "Calls that already wait come first. Let callers wait (wait_ms) rather than ask again "
        "at once."
    ),
    Reason.LIMITS.value: "Blocks are available, but the tenant's maximum, or what other tenants are guaranteed, keeps "
    "it from using them. Raise its maximum, or tell the tenant.",
    Reason.LEASES.value: "All rows of the block table are in use. Raise max_leases.",
    Reason.TENANT_LEASES.value: "The tenant has as many leases as it may have. Raise its leases_max (kvlease tenants "
    "set), or tell the tenant; more memory would not help.",
    Reason.KEPT_LEASES.value: "The free rows of the block table are kept for other tenants. Raise max_leases.",
}
"""What to do if there was no room, by the reason, as in docs/runbooks/KvleasePoolExhausted.md."""
_OF_TENANT: Final = (
    "The request is larger than its tenant's maximum, and the pool might hold it. The refusal itself tells which of "
    "max_percent and max_bytes to raise (kvlease tenants set); or let it ask for less."
)
_NONE: Final[Mapping[str, Tally]] = {}
_OF_ROOM: Final = frozenset({PoolFullError.code, DeadlineError.code})
"""The codes of refusals for want of room; other errors say themselves what to do."""

_OF_CODE: Final[Mapping[str, str]] = {
    UnknownWorkerError.code: "No token was sent, or the token is unknown. A worker must attach again; kvlease reads "
    "any other token from the file that KVLEASE_TOKEN_FILE names. The log says who called "
    "(caller_refused).",
}
"""What to do by the code, in words for readers of the page, who are not the callers that were refused."""


def refusals(codes: Codes, tallies: Mapping[str, Tally] = _NONE) -> list[dict[str, object]]:
    """Return how often each verb was refused, by which of the caches and why, the most frequent first."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    of_caches: Counter[tuple[str, str]] = Counter()
    for cache, tally in tallies.items():
        for kind, count in tally.refusals.items():
            if kind != OTHER:
                counts[cache, *kind] = count
                of_caches[kind[:2]] += count
    answered: Counter[tuple[str, str]] = Counter()
    for (verb, _, code), count in codes.items():
        if code != "OK":
            answered[verb, code] += count
    # What no cache counted was refused before one was asked, or by one that was deleted since.
    counts.update({("", *kind, ""): count for kind, count in (answered - of_caches).items()})
    ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return [
        {
            "cache": cache,
            "verb": verb,
            "code": code,
            "reason": reason,
            "count": count,
            "why": _why(code, reason),
        }
        for (cache, verb, code, reason), count in ordered
    ]


def _why(code: str, reason: str) -> str:
    """Return what to do: by the reason if there was no room, else as the error's docstring says."""
    if code in _OF_ROOM and reason in ADVICE:
        return ADVICE[reason]
    if (code, reason) == (NeverFitsError.code, TENANT_BLOCKS):
        return _OF_TENANT
    if code in _OF_CODE:
        return _OF_CODE[code]
    kind = BY_CODE.get(code)
    text = (kind.__doc__ or "") if kind is not None else ""
    return text.strip().partition("\n")[0]
