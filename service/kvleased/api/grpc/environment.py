"""Own what gRPC is told by the environment, which it reads when it is first used; nothing of it is imported here."""

import os
from collections.abc import Mapping
from typing import Final

VARIABLES: Final[Mapping[str, str]] = {
    # Left to itself it writes a line for every handshake that fails, which strangers could cause without end.
    "GRPC_VERBOSITY": "ERROR",
    # Its newer listener hands each read and write to threads of its own. Without them a reserve takes an eighth less
    # time, and the daemon a sixth less of the processor; a gRPC that has no other listener says so on stderr, once.
    "GRPC_EXPERIMENTS": "-event_engine_listener",
}
"""What is set unless an operator has set it."""


def prepare() -> None:
    """Set the variables; called before gRPC is first used."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
