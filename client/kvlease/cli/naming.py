"""Own how a command line names the cache: by `--cache NAME`, or by the name alone; both mean the same."""

from contextlib import suppress
from typing import Annotated, TypeAlias

import typer

from kvlease.client import Client
from kvlease.errors import UnknownLeaseError
from kvlease.replies import Explanation

_HINT = "'--cache'"


def given(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """Refuse an empty name, as of a variable that a script has not set: without a name, more would be meant."""
    source = context.get_parameter_source(parameter.name or "")
    if not value and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("it is empty; write a name, or leave it out")
    return value


Named: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CACHE", callback=given, help="The cache's name; --cache CACHE means the same."
    ),
]
OneCache: TypeAlias = Annotated[
    str, typer.Option("--cache", help="The cache's name, which is required.")
]
OnlyCache: TypeAlias = Annotated[
    str, typer.Option("--cache", help="The cache.", show_default="the only one there is")
]


def either(name: str, cache: str) -> str:
    """Return the cache that is named, in either way or in both; empty if none is named."""
    if name and cache and name != cache:
        raise typer.BadParameter(
            f"{cache!r} and {name!r} are two different caches; name only one", param_hint=_HINT
        )
    return name or cache


def required(name: str, cache: str) -> str:
    """Return the cache that is named; a command that takes something away never guesses the cache."""
    found = either(name, cache)
    if not found:
        raise typer.BadParameter("name the cache; kvlease caches lists them", param_hint=_HINT)
    return found


def explained(client: Client, lease_id: int, cache: str) -> Explanation:
    """Return the explanation of a lease; if no cache is named, look for the one that has the lease.

    Raises:
        UnknownLeaseError: no cache has it.
    """
    names = [] if cache else [one.cache for one in client.list_caches()]
    if len(names) <= 1:
        return client.explain_lease(lease_id, cache=cache)
    for name in names:
        with suppress(UnknownLeaseError):
            return client.explain_lease(lease_id, cache=name)
    message = f"none of the caches {', '.join(names)} has a lease {lease_id}; it may have ended"
    raise UnknownLeaseError(message, resource="lease_id")


def unpinned(client: Client, pin_id: int, cache: str) -> bool:
    """End a pin and return whether it was there; if no cache is named, look for the one that has the pin."""
    names = [] if cache else [one.cache for one in client.list_caches()]
    if len(names) <= 1:
        return client.unpin(pin_id, cache=cache)
    return any(client.unpin(pin_id, cache=name) for name in names)
