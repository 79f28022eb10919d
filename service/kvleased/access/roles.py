"""Own who may do what: the roles of callers, and the one table of what each of them may call and read.

How a caller comes to a role is the adapters' business (peer, certificate) and `tokens`' (bearer tokens).
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final


class Role(Enum):
    """What the daemon takes a caller for; the value is the word for it."""

    STRANGER = "stranger"
    """Nobody known: over TCP, without a token."""
    READER = "reader"
    """Looks at everything, and changes nothing."""
    JOINER = "joiner"
    """May attach, and so become a worker; knows of caches, and of nothing in them."""
    WORKER = "worker"
    """Attached: by the token that attach returned, for its own leases and its own tenant's blocks alone."""
    OPERATOR = "operator"
    """Everything but what is a worker's own: leases are those of the worker that reserved them."""

    # There is one object of each. Enum's own hash is written in Python, and each call is looked up by its role.
    __hash__ = object.__hash__


Roles = frozenset[Role]

_STRANGER, _READER, _JOINER, _WORKER, _OPERATOR = Role
ANYBODY: Final = frozenset(Role)
"""Says nothing of the daemon that its port does not say."""
KNOW: Final = frozenset({_READER, _JOINER, _WORKER, _OPERATOR})
LOOK: Final = frozenset({_READER, _WORKER, _OPERATOR})
"""A worker sees its own tenant's."""
LOOK_AT_ALL: Final = frozenset({_READER, _OPERATOR})
JOIN: Final = frozenset({_JOINER, _OPERATOR})
"""Whoever may name a cache and a tenant; the token of one worker makes no other one."""
USE: Final = frozenset({_WORKER, _OPERATOR})
OWN: Final = frozenset({_WORKER})
RULE: Final = frozenset({_OPERATOR})

OF_VERB: Final[Mapping[str, Roles]] = {
    "attach": JOIN,
    "clear": RULE,
    "commit": OWN,
    "delete_cache": RULE,
    "detach": USE,
    "drain": RULE,
    "evict": USE,
    "exchange": OWN,
    "explain": LOOK,
    "extend": OWN,
    "fork": OWN,
    "get_cache": KNOW,
    "get_tenant": LOOK_AT_ALL,
    "heartbeat": OWN,
    "inspect": LOOK,
    "inventory": OWN,
    "list_caches": KNOW,
    "lookup": USE,
    "map": OWN,
    "pin": USE,
    "plan": JOIN,
    "register_cache": JOIN,
    "release": OWN,
    "reload": USE,
    "reserve": OWN,
    "resize": RULE,
    "set_tenant": RULE,
    "stats": LOOK,
    "step": OWN,
    "trace": RULE,
    "trim": OWN,
    "undrain": RULE,
    "unpin": USE,
    "watch": LOOK_AT_ALL,
}
"""Who may call a verb, over whatever transport; a verb that is not listed is the operator's."""

OF_OPERATION: Final[Mapping[str, Roles]] = {"detach": OWN, "end_worker": RULE}
"""The same for operations of REST that are a part of what their verb is."""

OF_PATH: Final[Mapping[str, Roles]] = {
    "/livez": ANYBODY,
    "/readyz": ANYBODY,
    "/startupz": ANYBODY,
    "/metrics": LOOK_AT_ALL,
    "/openapi.json": ANYBODY,
    "/docs": ANYBODY,
    "/ui": ANYBODY,
    "/ui/{name}": ANYBODY,
    "/ui/data/live": LOOK_AT_ALL,
    "/ui/data/map": LOOK_AT_ALL,
    "/ui/data/block": LOOK_AT_ALL,
}
"""Who may ask for what is served beside the API."""

OF_SERVICE: Final[Mapping[str, Roles]] = {
    "grpc.health.v1.Health": ANYBODY,
    "grpc.reflection.v1.ServerReflection": ANYBODY,
    "grpc.reflection.v1alpha.ServerReflection": ANYBODY,
}
"""Who may call the services that are served beside kvlease's own over gRPC."""


def of_verb(verb: str) -> Roles:
    """Return who may call a verb."""
    return OF_VERB.get(verb, RULE)
