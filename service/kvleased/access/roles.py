"""Own who may do what: the roles of callers, and the one table of what each role may call and read.

The adapters (peer, certificate) and `tokens` (bearer tokens) decide which role a caller has.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final


class Role(Enum):
    """The role of a caller; the value is the word for it."""

    STRANGER = "stranger"
    """Unknown: a caller over TCP without a token that the daemon knows."""
    READER = "reader"
    """May look at everything, and change nothing."""
    JOINER = "joiner"
    """May register caches and attach, and so become a worker; may know of caches, but not of what is in them."""
    WORKER = "worker"
    """Attached, and known by the token that attach returned: for its own leases and its own tenant's blocks alone."""
    OPERATOR = "operator"
    """May do everything but what is a worker's own, as a lease belongs to the worker that reserved it."""

    # There is one object of each member, so identity will do: Enum's own hash is written in Python, and every call
    # hashes a role.
    __hash__ = object.__hash__


Roles = frozenset[Role]

_STRANGER, _READER, _JOINER, _WORKER, _OPERATOR = Role
ANYBODY: Final = frozenset(Role)
"""For what tells no more about the daemon than its open port."""
KNOW: Final = frozenset({_READER, _JOINER, _WORKER, _OPERATOR})
LOOK: Final = frozenset({_READER, _WORKER, _OPERATOR})
"""For looking; a worker sees only what is its own tenant's."""
LOOK_AT_ALL: Final = frozenset({_READER, _OPERATOR})
JOIN: Final = frozenset({_JOINER, _OPERATOR})
"""For callers that may name a cache and a tenant; a worker's token cannot attach another worker."""
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
"""Who may call a verb, over any transport; a verb that is not listed is the operator's."""

OF_OPERATION: Final[Mapping[str, Roles]] = {"detach": OWN}
"""Who may call an operation of REST that is only a part of its verb."""

OF_PATH: Final[Mapping[str, Roles]] = {
    "/livez": ANYBODY,
    "/readyz": ANYBODY,
    "/startupz": ANYBODY,
    "/metrics": LOOK_AT_ALL,
    "/openapi.json": ANYBODY,
    "/docs": ANYBODY,
    "/ui": ANYBODY,
    "/ui/": ANYBODY,
    "/ui/{name}": ANYBODY,
    "/ui/data/live": LOOK_AT_ALL,
    "/ui/data/map": LOOK_AT_ALL,
    "/ui/data/block": LOOK_AT_ALL,
}
"""Who may request a path that is served beside the API."""

OF_SERVICE: Final[Mapping[str, Roles]] = {
    "grpc.health.v1.Health": ANYBODY,
    "grpc.reflection.v1.ServerReflection": ANYBODY,
    "grpc.reflection.v1alpha.ServerReflection": ANYBODY,
}
"""Who may call a service of gRPC that is served beside kvlease's own."""


def of_verb(verb: str) -> Roles:
    """Return who may call a verb."""
    return OF_VERB.get(verb, RULE)
