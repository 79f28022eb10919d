"""Own the entry point of `vllm.general_plugins`, through which every vLLM process learns the connectors' names.

Without it a connector is found only by its module path, and its first use makes the names known, as MultiConnector
rebuilds statistics by name.
"""

import logging
from typing import Final

_logger: Final = logging.getLogger(__name__)

_NAMES: Final = (
    "KVLeaseOffloadingConnector",
    "KVLeaseOwnedConnector",
    "KVLeaseSharedConnector",
)


def register() -> None:
    """Register the connectors with vLLM's factory; safe to call again, and never raises into the engine."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - only inside of vLLM
        KVConnectorFactory,
    )

    for name in _NAMES:
        try:
            KVConnectorFactory.register_connector(name, "kvlease.integrations.vllm", name)
        except ValueError:
            _logger.debug("The connector %s is already registered.", name)
