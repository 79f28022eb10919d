"""Own kvlease's connectors for vLLM: three, each loaded on first use; the modules beside hold what they share.

vLLM's configuration names this package as a module path. The first use of a connector checks that the installed vLLM
has what the connector's mode needs. If not, it raises an ImportError that names what is missing. If it has, but is not
of a release that the connectors are tested with, the log says so.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kvlease.integrations.vllm.hooks import require_hooks, warn_of_another_release
from kvlease.integrations.vllm.logs import join_engine_log
from kvlease.integrations.vllm.plugin import register

if TYPE_CHECKING:
    from kvlease.integrations.vllm.offload.connector import KVLeaseOffloadingConnector
    from kvlease.integrations.vllm.offload.spec import KVLeaseOffloadingSpec
    from kvlease.integrations.vllm.owned.connector import KVLeaseOwnedConnector
    from kvlease.integrations.vllm.shared.connector import KVLeaseSharedConnector

__all__ = [
    "KVLeaseOffloadingConnector",
    "KVLeaseOffloadingSpec",
    "KVLeaseOwnedConnector",
    "KVLeaseSharedConnector",
]

HOMES: Final = {
    "KVLeaseOffloadingConnector": ("offload", "connector"),
    "KVLeaseOffloadingSpec": ("offload", "spec"),
    "KVLeaseOwnedConnector": ("owned", "connector"),
    "KVLeaseSharedConnector": ("shared", "connector"),
}
"""The mode and the module of each public name."""


def __getattr__(name: str) -> Any:
    """Load a public name on its first use.

    Raises:
        ImportError: vLLM is not installed, or lacks a hook that the connectors need.
    """
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    mode, module = HOMES[name]
    require_hooks(mode)
    join_engine_log()
    warn_of_another_release()
    # VLLM_PLUGINS may leave out our entry point, and MultiConnector fails on statistics of a name that is unknown.
    register()
    home = import_module(f"{__name__}.{mode}.{module}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
