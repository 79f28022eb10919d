"""Own the commands with which an operator changes what runs: to drain, clear, resize, delete and unpin, and limits."""

import dataclasses
import json
import time
from typing import Annotated, Any, Final

import typer

from kvlease.cli.connecting import Address, Json, connected
from kvlease.cli.naming import Named, OneCache, either, given, required, unpinned
from kvlease.cli.printing import counted, say
from kvlease.client import Client, Resizable
from kvlease.errors import InvalidError
from kvlease.operating import Cleared, Drained, DrainedCache, TenantLimits, TenantRule
from kvlease.units import parse_bytes

_LOOK_SECONDS: Final = 0.2
"""Seconds between two looks at how far a drain has come."""
_NAMED_MAX: Final = 8
"""Most leases, or pins, that one line names."""
_UNTIL: Final = "these limits last until the whole daemon ends; set them in the daemon's settings to keep them longer"
_UNSET_UNTIL: Final = "without limits until the whole daemon ends; then those of its settings hold again, if it has any"
_ENDED: Final = (
    "leases are granted again: somebody ended the drain, or the daemon started anew; the drain is not "
    "repeated"
)
NOT_SO: Final = 3
"""The exit status if the state is not what was asked for, such as a drain that has not ended in time."""
UNDONE: Final = 4
"""The exit status if somebody ended the drain that the command waited for, or the whole daemon started anew."""


def _read_bytes(written: str) -> int:
    try:
        return parse_bytes(written)
    except InvalidError as error:
        raise typer.BadParameter(error.message) from error


def _bytes_option(text: str) -> Any:
    return typer.Option(parser=_read_bytes, metavar="BYTES", help=text)


def drain(
    name: Named = "",
    *,
    address: Address = "",
    cache: Annotated[
        str, typer.Option(callback=given, help="Only this cache.", show_default="the daemon")
    ] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Grant leases again.")] = False,
    wait_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="Wait this long for leases to end. Exit status 3: some are left; 4: leases are granted again.",
        ),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Grant no new leases, in one cache or in the whole daemon, which is then not ready; running leases go on."""
    cache = either(name, cache)
    with connected(address) as client:
        if undo:
            _tell_drain(client.undrain(cache=cache), cache, as_json=as_json)
            return
        found = client.drain(cache=cache)
        if wait_seconds:
            found = _waited(client, cache, found, wait_seconds)
    _tell_drain(found, cache, as_json=as_json)
    if wait_seconds and not _holds(found, cache):
        typer.echo(_ENDED, err=True)
        raise typer.Exit(UNDONE)
    if wait_seconds and found.num_leases:
        raise typer.Exit(NOT_SO)


def undrain(
    name: Named = "",
    *,
    address: Address = "",
    cache: Annotated[
        str, typer.Option(callback=given, help="Only this cache.", show_default="the daemon")
    ] = "",
    as_json: Json = False,
) -> None:
    """Grant leases again after a drain, as drain --undo does."""
    with connected(address) as client:
        cache = either(name, cache)
        _tell_drain(client.undrain(cache=cache), cache, as_json=as_json)


def _waited(client: Client, cache: str, found: Drained, wait_seconds: float) -> Drained:
    """Look until no lease is left, leases are granted again or the time is over, and return what was seen last.

    It drains nothing a second time: somebody else may have ended the drain, or the daemon may have started anew.
    """
    deadline = time.monotonic() + wait_seconds
    while found.num_leases and _holds(found, cache) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        found = _progress(client, cache)
    return found


def _progress(client: Client, cache: str) -> Drained:
    stats = client.stats(cache)
    drained = {one.cache for one in client.list_caches() if one.is_draining}
    return Drained(
        is_daemon_draining=stats.is_draining,
        caches=tuple(
            DrainedCache(
                cache=one.cache,
                is_draining=one.cache in drained,
                num_leases=one.num_leases,
                num_waiting=one.num_waiting,
                num_workers=one.num_workers,
            )
            for one in stats.caches
        ),
    )


def _holds(found: Drained, cache: str) -> bool:
    """Tell whether what was drained still grants nothing new, because of its own drain or the daemon's."""
    if not cache:
        return found.is_daemon_draining
    return all(one.is_draining for one in found.caches)


def _tell_drain(found: Drained, cache: str, *, as_json: bool) -> None:
    """Say what grants leases; of the daemon only what bears on a cache that was named."""
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
        return
    if found.is_daemon_draining or not cache:
        say(f"the daemon {_state(is_draining=found.is_daemon_draining)}")
    for one in found.caches:
        state = _state(is_draining=one.is_draining)
        say(
            f"{one.cache} {state}: {counted(one.num_leases, 'lease')}, {counted(one.num_waiting, 'call')} waiting, "
            f"{counted(one.num_workers, 'worker')}"
        )


def _state(*, is_draining: bool) -> str:
    return "grants nothing new" if is_draining else "grants leases"


def clear(
    name: Named = "",
    *,
    address: Address = "",
    cache: OneCache = "",
    tenant: Annotated[
        str,
        typer.Option(
            callback=given,
            help="Only what this tenant has cached: its name, or the digest that kvlease tenants shows.",
            show_default="everybody's",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Drop the cached blocks that nobody holds, in all tiers except a remote one, and say what holds the others."""
    cache = required(name, cache)
    with connected(address) as client:
        found = client.clear(cache, tenant=tenant)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
        return
    say(
        f"dropped {counted(found.num_device, 'block')}, {counted(found.num_host, 'host slot')}, "
        f"{counted(found.num_disk, 'disk slot')}"
    )
    if tenant and not (found.num_device or found.num_host or found.num_disk or found.num_held):
        say(
            f"nothing is cached for a tenant {tenant!r} in {cache}; kvlease tenants lists all that have something"
        )
    if found.num_held:
        say(f"{found.num_held} {'is' if found.num_held == 1 else 'are'} held: {_holders(found)}")
    if found.keeps_remote:
        say("the remote store keeps what it has")


def _holders(found: Cleared) -> str:
    named = [
        f"{name} {', '.join(map(str, ids[:_NAMED_MAX]))}{' …' if len(ids) > _NAMED_MAX else ''}"
        for name, ids in (("leases", found.lease_ids), ("pins", found.pin_ids))
        if ids
    ]
    named += [
        f"{count} {what}"
        for count, what in (
            (found.num_copying, "being copied"),
            (found.num_in_magazines, "in magazines"),
        )
        if count
    ]
    return "; ".join(named) or "by something that has just ended"


def resize(
    name: Named = "",
    *,
    blocks: Annotated[
        int,
        typer.Option(
            min=0, help="Blocks, or slots, that the pool can then grant; 0 only for the host pool."
        ),
    ],
    cache: OneCache = "",
    tier: Annotated[str, typer.Option(help="The pool: device or host.")] = "device",
    address: Address = "",
    as_json: Json = False,
) -> None:
    """Take blocks of a pool out of use and give their memory back, or bring them back into use."""
    wanted: Resizable = "host" if tier == "host" else "device"
    if tier != wanted:
        raise typer.BadParameter(f"{tier!r} is neither device nor host", param_hint="--tier")
    if wanted == "device" and not blocks:
        message = (
            "a device pool has at least 1 block; kvlease drain makes a cache grant nothing, and kvlease delete "
            "deletes it"
        )
        raise typer.BadParameter(message, param_hint="--blocks")
    cache = required(name, cache)
    with connected(address) as client:
        found = client.resize(cache, wanted, blocks)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
        return
    room = counted(found.num_blocks, "block" if tier == "device" else "slot")
    can = "granted" if tier == "device" else "used"
    parked = f"{found.num_parked:,} {'is' if found.num_parked == 1 else 'are'} out of use"
    lost = counted(found.num_evicted, "cached block")
    say(
        f"{room} can be {can}, {parked}; {lost} {'was' if found.num_evicted == 1 else 'were'} dropped, and "
        f"{found.bytes_given_back:,} bytes are given back"
    )


def delete(
    name: Named = "",
    *,
    cache: OneCache = "",
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Remove its disk store, too; refused if the store is off."),
    ] = False,
    address: Address = "",
    as_json: Json = False,
) -> None:
    """Delete a cache, with its device and host pools and its pins; refused while a worker is attached to it.

    Its disk store stays, with all that was cached, for when the cache is registered again, unless --purge removes it.
    A remote store always keeps what it has.
    """
    cache = required(name, cache)
    with connected(address) as client:
        found = client.delete_cache(cache, purge=purge)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
        return
    also = f", and {counted(found.num_pins, 'pin')} with it" if found.num_pins else ""
    say(f"{cache} is deleted{also}")
    if found.keeps_disk:
        say("its disk store is kept for when it is registered again; --purge would have removed it")
    if found.keeps_remote:
        say("the remote store keeps what it has")


def unpin(
    pin_id: Annotated[
        int, typer.Argument(metavar="PIN", min=0, help="The pin's id, as in `kvlease pins`.")
    ],
    *,
    cache: Annotated[
        str, typer.Option(help="The cache.", show_default="the one with this pin")
    ] = "",
    address: Address = "",
    as_json: Json = False,
) -> None:
    """End a pin, whoever made it. Its blocks stay cached until their room is needed."""
    with connected(address) as client:
        was_there = unpinned(client, pin_id, cache)
    if as_json:
        typer.echo(json.dumps({"pin_id": pin_id, "released": was_there}, indent=2))
    elif was_there:
        say(f"pin {pin_id} has ended")
    else:
        typer.echo(f"there is no pin {pin_id}, or it has ended; kvlease pins lists them", err=True)
    if not was_there:
        raise typer.Exit(1)


def get_tenant(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant.")],
    *,
    address: Address = "",
    as_json: Json = False,
) -> None:
    """Show the limits of a tenant and their revision; a tenant that the daemon does not know has the defaults."""
    with connected(address) as client:
        rule = client.get_tenant(tenant)
    _tell_rule(rule, as_json=as_json)


def set_tenant(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant.")],
    *,
    address: Address = "",
    min_percent: Annotated[
        float | None, typer.Option(help="Percent of each device pool that it can always get.")
    ] = None,
    min_bytes: Annotated[
        int | None, _bytes_option("The same in bytes, such as 8GiB; the larger of the two applies.")
    ] = None,
    max_percent: Annotated[
        float | None, typer.Option(help="Percent of each device pool that it can have at most.")
    ] = None,
    max_bytes: Annotated[
        int | None, _bytes_option("The same in bytes; 0: no limit. The smaller of the two applies.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="Its weight, which decides its share against the others'.")
    ] = None,
    pinned_percent_max: Annotated[
        float | None,
        typer.Option(help="Percent of each device pool that its pins can hold at most."),
    ] = None,
    leases_max: Annotated[
        int | None, typer.Option(help="Leases of one cache that it can have at once; 0: no limit.")
    ] = None,
    unset: Annotated[
        bool, typer.Option("--unset", help="Remove all limits except those named here.")
    ] = False,
    revision: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The new revision; refused if not above the present one.",
            show_default="one more",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Change a tenant's limits at once; limits that are not named here stay as they are."""
    named = {
        "min_percent": min_percent,
        "min_bytes": min_bytes,
        "max_percent": max_percent,
        "max_bytes": max_bytes,
        "weight": weight,
        "pinned_percent_max": pinned_percent_max,
        "leases_max": leases_max,
    }
    if not unset and revision is None and all(value is None for value in named.values()):
        message = (
            "no limit is named; add one, such as --max-bytes 8GiB, or --unset, which removes all"
        )
        raise typer.BadParameter(message)
    with connected(address) as client:
        before = client.get_tenant(tenant)
        limits = {} if unset else dataclasses.asdict(before.limits)
        limits |= {name: value for name, value in named.items() if value is not None}
        wanted = before.revision + 1 if revision is None else revision
        rule = client.set_tenant(tenant, TenantLimits(**limits), revision=wanted)
    _tell_rule(rule, as_json=as_json)
    if not as_json:
        say(_UNTIL if limits else _UNSET_UNTIL)


def _tell_rule(rule: TenantRule, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(rule), indent=2))
        return
    told = ", ".join(
        f"{name} {_exactly(value)}" for name, value in dataclasses.asdict(rule.limits).items()
    )
    say(f"{rule.tenant}, revision {rule.revision}: {told}")


def _exactly(value: float) -> str:
    """Write a limit with all its digits, so that it can be set again as it is."""
    return str(value).removesuffix(".0")
