"""Own our connectors as vLLM's factory makes them for a play: real but for the sessions, which they find by a name."""

from typing import Any, Final

from kvlease.integrations.vllm.offload.connector import KVLeaseOffloadingConnector
from kvlease.integrations.vllm.owned.connector import KVLeaseOwnedConnector
from kvlease.integrations.vllm.shared.connector import KVLeaseSharedConnector
from tests.integrations.vllm.played.session import PlayedSession

SESSIONS: Final[dict[str, PlayedSession]] = {}
"""The sessions of engines that are starting, by the setting `socket`."""


class PlayedSharedConnector(KVLeaseSharedConnector):
    """The connector of shared mode over a played session."""

    def _open_session(self, had: Any = None) -> Any:
        del had
        return SESSIONS[self._settings.socket]


class PlayedOwnedConnector(KVLeaseOwnedConnector):
    """The connector of owned mode over a played session."""

    def _open_session(self, had: Any = None) -> Any:
        del had
        return SESSIONS[self._settings.socket]


class PlayedOffloadingConnector(KVLeaseOffloadingConnector):
    """The connector of offload mode over a played session."""

    def _session(self, rank: int) -> Any:
        assert rank == 0, "only the scheduler's half is played"
        return SESSIONS[self._settings.socket]
