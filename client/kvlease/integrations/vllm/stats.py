"""Own how a connector's counts travel as vLLM's statistics: plain sums by name, safe below MultiConnector.

MultiConnector rebuilds what it is sent by the connector's registered name and fails where there is none, so counts
travel only where vLLM knows the connector by the entry point's name. Only for processes that run inside of vLLM.
"""

from collections.abc import Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvlease.integrations.vllm.plugin import is_registered

_PREFIX: Final = "kvlease_"


class ConnectorStats(KVConnectorStats):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """What has happened since the statistics before: counts by name, added up over ranks and intervals."""

    def reset(self) -> None:
        """Forget the counts."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or interval's counts to these."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts under names that tell where they come from, for vLLM's log line."""
        return {_PREFIX + name: count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Tell whether nothing has happened."""
        return not any(self.data.values())


class StatsSource:
    """The statistics of one connector in one process: what its counters have grown by since they were asked before."""

    def __init__(self, connector_name: str, *, is_wanted: bool = True) -> None:
        """Remember under which name the connector is registered, and whether anybody wants its figures."""
        self._is_wanted = is_wanted and is_registered(connector_name)
        self._told: dict[str, int] = {}

    def since(self, counts: Mapping[str, int]) -> ConnectorStats | None:
        """Return how much each count has grown since the last call; None where there is nothing to tell."""
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
