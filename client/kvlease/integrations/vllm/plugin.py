"""Own the entry point of the group `vllm.general_plugins`: every process of vLLM then knows the connectors by name.

Without it a connector is found by its module path alone; names are what MultiConnector rebuilds statistics by.
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
    """Tell vLLM's factory the connectors' names; safe to call again, and never raises into the engine."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - only inside of vLLM
        KVConnectorFactory,
    )

    for name in _NAMES:
        try:
            KVConnectorFactory.register_connector(name, "kvlease.integrations.vllm", name)
        except ValueError:
            _logger.debug("The connector %s is registered already.", name)


def is_registered(name: str) -> bool:
    """Tell whether vLLM knows a connector by name, here and so in all of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - only inside of vLLM
        KVConnectorFactory,
    )

    try:
        KVConnectorFactory.get_connector_class_by_name(name)
    except (ImportError, ValueError):
        return False
    return True
