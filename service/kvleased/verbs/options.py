"""Own the options of a registration, with all defaults filled in, and the check that they suit a plan.

Whether the node has what a plan needs (a disk, a remote store) is checked here, too; whether there is room is checked
in `making`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvlease.errors import InvalidError
from kvlease.options import WRITE_AFTER_HITS_MAX
from kvlease.plan import CachePlan
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.calls import checks
from kvleased.config.settings import Settings
from kvleased.core.eviction import POLICIES
from kvleased.core.shape import WritePolicy

INTEGRITIES: Final = ("xxh3", "none")
WRITE_POLICIES: Final = tuple(policy.value for policy in WritePolicy)
EVICTION_POLICIES: Final = POLICIES
"""The first of each is the default."""


def resolved(options: pb.CacheOptions) -> pb.CacheOptions:
    """Return options with all defaults filled in.

    Raises:
        InvalidError: an option has an unknown value, or contradicts another.
    """
    found = pb.CacheOptions(
        integrity=_one_of("integrity", options.integrity, INTEGRITIES),
        write_policy=_one_of("write_policy", options.write_policy, WRITE_POLICIES),
        eviction_policy=_one_of("eviction_policy", options.eviction_policy, EVICTION_POLICIES),
        ghosts=_ghosts(options.ghosts),
    )
    counts_hits = found.write_policy == WritePolicy.AFTER_N_HITS.value
    if options.HasField("write_after_hits") and not counts_hits:
        message = (
            f"write_after_hits is {options.write_after_hits}, but write_policy is {found.write_policy}; leave "
            f"write_after_hits out, or set write_policy to {WritePolicy.AFTER_N_HITS.value}"
        )
        raise InvalidError(message, resource="write_after_hits", need=options.write_after_hits)
    if counts_hits:
        hits = options.write_after_hits if options.HasField("write_after_hits") else 1
        found.write_after_hits = checks.count("write_after_hits", hits, 1, WRITE_AFTER_HITS_MAX)
    return found


def option_differences(old: pb.CacheOptions, asked: pb.CacheOptions) -> list[str]:
    """Return the differences from resolved options, such as "write_policy (on-evict, not write-through)".

    An option that was not asked for never differs: a worker need not know what an operator chose.
    """
    new = resolved(asked)
    names = [field.name for field, _ in asked.ListFields()]
    pairs = ((name, _shown(getattr(old, name)), _shown(getattr(new, name))) for name in names)
    return [f"{name} ({one}, not {other})" for name, one, other in pairs if one != other]


def to_metadata(options: pb.CacheOptions) -> dict[str, Any]:
    """Return options in the form of JSON, to be kept over restarts."""
    return {
        field.name: list(value) if field.is_repeated else value
        for field, value in options.ListFields()
    }


def from_metadata(metadata: Mapping[str, Any]) -> pb.CacheOptions:
    """Return the options that were kept."""
    return pb.CacheOptions(**metadata)


def require_tiers(planned: CachePlan, options: pb.CacheOptions, settings: Settings) -> None:
    """Refuse a plan with tiers that this daemon cannot have, and a write policy without a tier to write to.

    Raises:
        InvalidError: the message says what to change.
    """
    if planned.num_disk_slots and settings.disk_dir is None:
        message = (
            f"the plan has {planned.num_disk_slots} disk slots, but this daemon has no disk_dir; start it with a "
            "disk_dir, or set disk_bytes to 0"
        )
        raise InvalidError(
            message, resource="disk_bytes", rule="no_disk_dir", remedies=("disk_bytes=0",)
        )
    if planned.num_remote_slots and not settings.remote_url:
        message = (
            f"the plan has {planned.num_remote_slots} remote slots, but this daemon has no remote_url; start it with a "
            "remote_url, or set remote_bytes to 0"
        )
        raise InvalidError(
            message, resource="remote_bytes", rule="no_remote_url", remedies=("remote_bytes=0",)
        )
    if planned.num_slots:
        return
    lower = "disk_bytes" if planned.num_disk_slots else "remote_bytes"
    if planned.num_disk_slots or planned.num_remote_slots:
        message = (
            f"{lower} is set, but host_bytes is not: blocks reach a store only through the host pool; set host_bytes "
            f"to at least {planned.bytes_per_slot}, one slot, or set {lower} to 0"
        )
        raise InvalidError(
            message,
            resource="host_bytes",
            rule="store_needs_host",
            need=planned.bytes_per_slot,
            available=0,
        )
    if options.write_policy != WritePolicy.ON_EVICT.value:
        message = (
            f"write_policy is {options.write_policy}, but there is no lower tier to write to; set host_bytes, or leave "
            "write_policy out"
        )
        raise InvalidError(message, resource="write_policy", rule="write_policy_needs_host")


def _ghosts(written: Sequence[str]) -> list[str]:
    if not written:
        return []
    from kvleased.traces.ghosts import read_ghosts  # noqa: PLC0415 -- few caches have any

    return [one.name for one in read_ghosts(written)]


def _one_of(field: str, value: str, names: tuple[str, ...]) -> str:
    return checks.one_of(field, value or names[0], names)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str | int) else ", ".join(value) or "none"


def registration(digest: str, options: pb.CacheOptions) -> dict[str, Any]:
    """Return what is kept of a new cache beside its plan, whose digest is given."""
    facts = {"digest": digest, "options": to_metadata(options)}
    return {**facts, "is_scanned": False, "disk_file_id": ""}
