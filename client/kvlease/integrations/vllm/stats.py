"""Own how a connector's counts travel as vLLM's statistics: plain sums by name, safe below MultiConnector.

MultiConnector rebuilds statistics by the connector's registered name, and fails if there is none. So counts travel only
if vLLM knows the connector by the entry point's name. Import this only in processes that run inside vLLM.
"""

from collections.abc import Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvlease.integrations.vllm.plugin import is_registered

_PREFIX: Final = "kvlease_"


class ConnectorStats(KVConnectorStats):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """The counts since the last statistics, by name, added up over ranks and intervals."""

    def reset(self) -> None:
        """Forget the counts."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or interval's counts to these."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's log line, under names that begin with the library's."""
        return {_PREFIX + name: count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Tell whether nothing has happened."""
        return not any(self.data.values())


class StatsSource:
    """The statistics of one connector in one process: how much its counts have grown since the last call."""

    def __init__(self, connector_name: str, *, is_wanted: bool = True) -> None:
        """Remember whether vLLM knows the connector by name, and whether anybody wants its figures."""
        self._is_wanted = is_wanted and is_registered(connector_name)
        self._told: dict[str, int] = {}

    def since(self, counts: Mapping[str, int]) -> ConnectorStats | None:
        """Return how much each count has grown since the last call; None if there is nothing to report."""
        if not self._is_wanted:
            return None
        grown = {
            name: count - self._told.get(name, 0)
            for name, count in counts.items()
            if count != self._told.get(name, 0)
        }
        if not grown:
            return None
        self._told.update(counts)
        return ConnectorStats(data=grown)


def rebuilt(data: dict[str, Any] | None) -> ConnectorStats:
    """Return the statistics that were sent, for a connector's `build_kv_connector_stats`."""
    return ConnectorStats(data=data or {})
