"""Meanings of label values, for docs/metrics.md; a test compares them with the code that sets the labels."""

from collections.abc import Mapping
from typing import Final

STATES: Final[Mapping[str, str]] = {
    "free": "nobody's",
    "reserved": "a lease or a magazine may write it; a slot: it has the bytes of a lease that is off the device",
    "filling": "a copy writes it",
    "ready": "findable, whether held or not",
    "quarantined": "a worker that is silent might still write it",
    "scrubbing": "being zeroed before another tenant has it",
    "bad": "retired for good",
    "parked": "out of use: a resize gave its memory back",
}
DIRECTIONS: Final[Mapping[str, str]] = {
    "device_to_host": "blocks leave for the host pool",
    "host_to_device": "they come back",
    "device_to_device": "a fork copies a block",
    "scrub": "zeros are written to device blocks; there is no source",
    "host_to_disk": "to the disk store",
    "disk_to_device": "from it",
    "host_to_remote": "to the remote store",
    "remote_to_device": "from it",
}
SHORTAGES: Final[Mapping[str, str]] = {
    "blocks": "more blocks are needed than can be had",
    "copies": "enough come free as soon as copies, or the zeroing of blocks, have ended",
    "position": "others that wait come first",
    "limits": "only the tenant's maximum, or what others are guaranteed, keeps it from blocks that are there",
    "leases": "all rows of the block table are in use",
    "tenant_leases": "the tenant has as many leases as it may have",
    "kept_leases": "the free rows of the block table are kept for other tenants",
}
DEPARTURES: Final[Mapping[str, str]] = {
    "evicted": "the policy chose it, for want of room",
    "displaced": "an evict call, or a worker, asked for it",
    "cleared": "a clear took it",
    "resized": "a resize made the tier smaller",
    "store_lost": "the disk store's file was lost, or another one took its place",
    "damaged": "its bytes were not what their checksum says",
}
MISSED: Final[Mapping[str, str]] = {
    **DEPARTURES,
    "cached": "it is there, but behind one that is not",
    "unknown": "nobody knows of it: most of these were never there",
}
ENDS: Final[Mapping[str, str]] = {
    "released": "by its owner's word",
    "detached": "its worker was detached",
    "died": "its worker's death was proven",
    "expired": "it was not renewed in time, in the host pool; on the device it is quarantined and lives on",
    "orphaned": "its worker had lost it",
    "damaged": "its bytes in the host pool were not what they were",
}
RESTARTS: Final[Mapping[str, str]] = {
    "ended": "it ended by itself, or somebody killed it",
    "silent": "it showed no sign of life for `control_silent_seconds_max`, and was killed",
}
CALLS: Final[Mapping[str, str]] = {
    "unsaid": "the refusal names neither a rule nor a thing; any other value is the error's `rule`, or else its "
    "`resource`",
}
TABLES: Final[tuple[tuple[str, Mapping[str, str]], ...]] = (
    ("`state` of `kvlease_blocks`, `kvlease_pool_bytes`", STATES),
    (
        "`direction` of `kvlease_copies_total`, `kvlease_copy_bytes_total`, `kvlease_copy_seconds_total`",
        DIRECTIONS,
    ),
    ("`reason` of `kvlease_refusals_total`, for want of room", SHORTAGES),
    ("`reason` of `kvlease_refusals_total` otherwise", CALLS),
    ("`reason` of `kvlease_control_restarts_total`", RESTARTS),
    ("`reason` of `kvlease_leases_ended_total`", ENDS),
    ("`reason` of `kvlease_evictions_total`", DEPARTURES),
    ("`reason` of `kvlease_missed_blocks_total`", MISSED),
)
