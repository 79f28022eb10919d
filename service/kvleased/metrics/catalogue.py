"""Own the name, kind, help text and labels of every metric; docs/metrics.md is written from here."""

from collections.abc import Mapping
from typing import Final

from kvleased.metrics.definitions import Definition, Kind
from kvleased.verbs.surveys import TENANTS_MAX

_TOLD_APART: Final = (
    f"At most {TENANTS_MAX} tenants are told apart: first those that have settings, then those that have a worker; all "
    "others are counted together under one name."
)


def _counter(name: str, text: str, *labels: str) -> Definition:
    return Definition(Kind.COUNTER, name, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Definition:
    return Definition(Kind.GAUGE, name, text, labels)


def _histogram(name: str, text: str, *labels: str) -> Definition:
    return Definition(Kind.HISTOGRAM, name, text, labels)


SECTIONS: Final[Mapping[str, tuple[Definition, ...]]] = {
    "The daemon": (
        _gauge("build_info", "The running build; always 1.", "version", "python"),
        _gauge("ready", "Whether the daemon can grant calls."),
        _gauge("epoch", "The number of this life of the daemon; it grows with every start."),
        _gauge(
            "credentials_stale",
            "Whether tokens or the certificate have changed to something that cannot be used, so that the old ones "
            "stay in force, or the certificate or the authority of clients' is outside its dates of validity.",
            "what",
        ),
        _gauge(
            "certificate_expires_timestamp_seconds",
            "When the certificate for TLS expires, or the authority of clients' certificates if that is earlier, in "
            "seconds since 1970; absent without TLS.",
        ),
        _counter(
            "control_restarts",
            "Control processes that were started to replace another, by what became of the other: it ended, or was "
            "silent for too long and was killed. Counted since the start of the whole daemon.",
            "reason",
        ),
        _counter(
            "mover_ends",
            "Movers that ended or were replaced, except those that ended with the control process.",
            "mover",
        ),
        _gauge(
            "connections",
            "Open connections of a listener, without those of strangers. For gRPC over TCP, the number is that of a "
            "second ago; connections to gRPC's Unix socket are not counted.",
            "listener",
        ),
        _gauge("connections_max", "Most connections, without those of strangers, that each listener has at once."),
        _gauge(
            "stranger_connections",
            "Open connections to REST, or to gRPC over TCP, that have shown no known token. There are at most 64 for "
            "each listener, 256 for gRPC; the oldest gives way to a new one.",
            "listener",
        ),
        _counter(
            "connections_turned_away",
            "Connections for which there was no place, by whose they were: a member's was refused, or one that was "
            "silent gave way to it; a stranger's gave way to a newer one.",
            "listener",
            "who",
        ),
        _gauge("watchers", "Watchers of events."),
        _gauge("watchers_max", "Most watchers at once."),
        _gauge("key_counts_bytes", "Bytes of the key counts that workers read, over all tenants."),
        _gauge("key_counts_bytes_max", "Most bytes that key counts may take; workers without them must ask."),
        _histogram(
            "loop_lag_seconds",
            "Seconds by which a clock of the control process's event loop was heard late.",
        ),
        _gauge(
            "process_private_bytes",
            "Memory that each process shares with no other process, so without pools.",
            "role",
        ),
        _gauge("process_open_fds", "Open file descriptors of each process.", "role"),
        _gauge(
            "memory_used_bytes",
            "Memory in use at the place where least is left: a cgroup of the daemon, or the machine.",
        ),
        _gauge("memory_limit_bytes", "The memory limit at the place that kvlease_memory_used_bytes is about."),
        _gauge("memory_pools_bytes", "Memory that pools have while their caches are there; a GPU's does not count."),
        _gauge("scrape_seconds", "Seconds that it took to compute the previous scrape."),
    ),
    "Pools": (
        _gauge(
            "blocks",
            "Blocks by state. The states of a tier add up to its capacity.",
            "cache", "tier", "state",
        ),
        _gauge("pool_bytes", "Bytes of the blocks by state, over all ranks.", "cache", "tier", "state"),
        _gauge(
            "blocks_held",
            "Ready blocks that something holds; they are part of the ready ones.",
            "cache", "tier",
        ),
        _gauge(
            "available_blocks",
            "Device blocks that are free or may be evicted: the size of the largest request that finds room.",
            "cache",
        ),
        _gauge(
            "tenant_blocks",
            "Blocks that hold a tenant's bytes: cached ones, which may be evicted, and held ones. " + _TOLD_APART,
            "cache", "tier", "tenant", "state",
        ),
        _gauge(
            "tenant_bytes",
            "Bytes of the blocks that hold a tenant's bytes, over all ranks.",
            "cache", "tier", "tenant", "state",
        ),
        _gauge(
            "tenant_pinned_blocks",
            "Device blocks of a tenant that pins hold; they are part of the held ones.",
            "cache", "tenant",
        ),
        _gauge(
            "tenant_limit_blocks",
            "Device blocks that a tenant can always get (min), and can have at most (max).",
            "cache", "tenant", "limit",
        ),
        _gauge("pins", "Pins.", "cache"),
        _gauge(
            "group_blocks",
            "Blocks of a group in live leases; a block counts once for each time that a lease lists it.",
            "cache", "group",
        ),
        _gauge(
            "group_unfilled_bytes",
            "Bytes of a group's blocks in live leases that lie behind the last token of their lease.",
            "cache", "group",
        ),
        _gauge(
            "group_padding_bytes",
            "Bytes of a group's blocks in live leases that the group's pages do not use.",
            "cache", "group",
        ),
        _gauge(
            "plan_waste_bytes",
            "Bytes that hold nothing because of the plan, whatever is cached.",
            "cache", "tier", "cause",
        ),
    ),
    "Calls": (
        _counter("requests", "Calls that were answered.", "verb", "transport", "code"),
        _histogram(
            "request_seconds",
            "Seconds from reading a call to writing its answer.",
            "verb", "transport",
        ),
        _counter(
            "refusals",
            "Calls that a cache refused, and operations and reserves of its steps, by the rule that was broken or the "
            "resource that was short.",
            "cache", "verb", "code", "reason",
        ),
        _counter("step_refusals", "Operations of steps that were refused, beside their reserves.", "cache", "code"),
        _gauge(
            "waiting_requests",
            "Requests that wait for blocks, by the priority that they have reached.",
            "cache", "priority",
        ),
        _gauge(
            "waiting_oldest_seconds",
            "Seconds that the oldest waiting call has waited; 0 if none waits.",
            "cache",
        ),
        _counter(
            "waits",
            "Calls that waited, for room or for copies, by what became of them.",
            "cache", "verb", "outcome",
        ),
        _histogram("wait_seconds", "Seconds that calls waited, for room or for copies.", "cache", "verb"),
    ),
    "Leases": (
        _gauge("leases", "Live leases, by phase.", "cache", "phase"),
        _gauge("leases_max", "Most leases at once.", "cache"),
        _gauge(
            "tenant_leases",
            "Live leases of a tenant. " + _TOLD_APART,
            "cache", "tenant",
        ),
        _gauge("tenant_leases_max", "Most leases that a tenant may have at once.", "cache", "tenant"),
        _gauge(
            "draining",
            "Whether a cache grants no new leases, because it or the whole daemon is drained.",
            "cache",
        ),
        _gauge(
            "lease_age_seconds",
            "Ages of the leases that were granted in this life of the daemon: median, p95 and oldest.",
            "cache", "statistic",
        ),
        _gauge(
            "quarantined_oldest_seconds",
            "Seconds since the first of the quarantined leases expired; 0 if there is none.",
            "cache",
        ),
        _gauge("workers", "Attached workers.", "cache"),
        _counter("leases_granted", "Leases that were granted.", "cache"),
        _counter("leases_released", "Leases that their owner released.", "cache"),
        _counter("leases_expired", "Leases that were not renewed in time.", "cache"),
        _counter(
            "leases_orphaned",
            "Leases that ended because their worker no longer knew them.",
            "cache",
        ),
        _counter(
            "leases_ended",
            "Granted leases that ended, by how they ended; `released` is `kvlease_leases_released_total`.",
            "cache", "reason",
        ),
        _counter(
            "leases_recovered",
            "Leases that went on after a restart of the control process, which does not count them as granted. Granted "
            "plus recovered leases are the live ones, except the `loading`, plus those that ended.",
            "cache",
        ),
        _counter("releases_unknown", "Releases of leases that had already ended.", "cache"),
        _counter("blocks_forked", "Blocks that were copied for a fork.", "cache"),
        _counter(
            "blocks_given_back",
            "Blocks that left a running lease because no later token needs them.",
            "cache",
        ),
    ),
    "Reuse and eviction": (
        _counter(
            "prefix_tokens",
            "Tokens of granted requests, by where their K and V came from; the outcomes add up to all tokens of the "
            "requests.",
            "cache", "outcome",
        ),
        _counter(
            "missed_blocks",
            "Blocks of prefixes that were not found, by reason: evicted before and needed now, displaced on request, "
            "cleared, taken by a resize or lost with their store, damaged, cached behind a miss, or unknown. They are "
            "looked up a moment after the grant, and only once a block has left a tier: before that, all would be "
            "unknown, and none is counted.",
            "cache", "reason",
        ),
        _counter("missed_blocks_not_looked_up", "Missed blocks whose reason there was no time to look up.", "cache"),
        _counter("evictions", "Blocks that left a tier, by reason.", "cache", "tier", "reason"),
        _histogram(
            "block_residence_seconds",
            "Seconds for which evicted blocks had been findable in their tier.",
            "cache", "tier",
        ),
        _histogram(
            "block_idle_seconds",
            "Seconds for which nobody had held evicted blocks.",
            "cache", "tier",
        ),
        _counter(
            "blocks_dropped",
            "Blocks that were evicted from the last tier that had them. Blocks taken by a clear, a resize or a loss "
            "are counted only in the evictions by reason.",
            "cache",
        ),
        _counter(
            "blocks_committed",
            "Device blocks that became findable, including those that a lower tier already has: a request that does "
            "not wait computes them again.",
            "cache",
        ),
        _counter("blocks_duplicate", "Committed blocks whose key was already findable.", "cache"),
        _counter(
            "ghost_keys",
            "Keys of granted requests that a ghost cache looked up.",
            "cache", "ghost",
        ),
        _counter(
            "ghost_hits",
            "Keys of granted requests that another policy or size would have found.",
            "cache", "ghost",
        ),
        _counter(
            "ghost_dropped_keys",
            "Keys of granted requests that no ghost cache had time for.",
            "cache",
        ),
    ),
    "Tiers and copies": (
        _gauge(
            "tier_up",
            "Whether a lower tier works. While it does not, everything in it is a miss.",
            "cache", "tier",
        ),
        _counter("blocks_moved", "Blocks that arrived in a tier.", "cache", "direction"),
        _gauge(
            "copies_in_flight",
            "Batches of copies of a cache that are being copied, or wait for their mover.",
            "cache",
        ),
        _counter("copies", "Batches of copies.", "direction", "result"),
        _counter("copy_bytes", "Bytes copied.", "direction", "result"),
        _counter("copy_seconds", "Seconds that movers spent copying.", "direction", "result"),
        _gauge(
            "mover_queue",
            "Batches of copies that are not done: waiting to be sent to their mover, or already sent to it.",
            "mover", "state",
        ),
        _gauge(
            "mover_oldest_seconds",
            "Seconds since the oldest of these batches began to wait; 0 if there is none.",
            "mover",
        ),
        _counter("copies_failed", "Copies that their mover gave up, or during which it died.", "cache"),
        _counter("copies_lost", "Copies that were not answered in time.", "cache"),
        _counter(
            "checksum_failures",
            "Blocks of the host pool whose bytes had changed.",
            "cache",
        ),
        _counter(
            "disk_failures",
            "Blocks that the disk store did not return as they were written.",
            "cache",
        ),
        _counter("store_failures", "Blocks that a store did not accept.", "cache", "tier"),
        _counter(
            "remote_misses",
            "Blocks that the remote store said it had, but did not return in time or as they were written.",
            "cache",
        ),
        _counter(
            "slots_adopted",
            "Blocks that an earlier life, or damage to its file, left in the disk store and that are findable again.",
            "cache",
        ),
        _counter(
            "disk_slots_forgotten",
            "Blocks that were forgotten because the disk store's file was replaced or damaged; those found again are "
            "adopted.",
            "cache",
        ),
    ),
    "Magazines": (
        _gauge(
            "magazine_blocks",
            "Device blocks in each magazine, by the magazine's place: private ones, and held ones, which are findable "
            "and which others may hold too.",
            "cache", "magazine", "state",
        ),
        _counter(
            "magazine_keys",
            "Keys of blocks that magazines asked to hold: held, cached but not held yet, or missed.",
            "cache", "outcome",
        ),
        _counter("magazine_exchanges", "Exchanges of magazines.", "cache"),
        _counter("magazine_blocks_taken", "Blocks that magazines took in order to write them.", "cache"),
        _counter(
            "magazine_blocks_retracted",
            "Findable blocks that magazines took back in order to write them again.",
            "cache",
        ),
    ),
}  # fmt: skip
"""All metrics, by subject."""

BY_NAME: Final = {one.name: one for section in SECTIONS.values() for one in section}

COUNTERS_OF_CORE: Final[Mapping[str, str]] = {
    "leases_granted": "leases_granted",
    "leases_released": "leases_released",
    "leases_expired": "leases_expired",
    "leases_orphaned": "leases_orphaned",
    "leases_recovered": "leases_recovered",
    "releases_unknown": "releases_unknown",
    "blocks_forked": "blocks_forked",
    "blocks_given_back": "blocks_given_back",
    "blocks_dropped": "blocks_dropped",
    "blocks_committed": "blocks_committed",
    "blocks_duplicate": "blocks_duplicate",
    "copies_failed": "copies_failed",
    "copies_lost": "copies_lost",
    "checksum_failures": "checksum_failures",
    "disk_failures": "disk_failures",
    "remote_misses": "remote_misses",
    "slots_adopted": "slots_adopted",
    "disk_slots_forgotten": "disk_slots_forgotten",
    "magazine_exchanges": "exchanges",
    "magazine_blocks_taken": "blocks_taken",
    "magazine_blocks_retracted": "blocks_retracted",
}
"""Metrics of a cache that are counters of its core, and the names of these counters."""
