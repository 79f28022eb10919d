"""Own how a step's id goes out to the ranks and comes back from them: vLLM's two kinds of metadata, and no more."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """Which step this is."""

    step_id: int
    parts: bool = False
    """Whether the ranks are to have their caches seen by no other engine any more, before the step is carried out."""


@dataclass(frozen=True, slots=True)
class StepsBack(KVConnectorWorkerMetadata):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """Up to which step the ranks that were asked have come back."""

    step_id: int
    is_apart: bool = False
    """Whether their caches are seen by no other engine any more."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepsBack":
        """Return how far both have come."""
        assert isinstance(other, StepsBack), "all ranks have the same connector"
        step_id = min(self.step_id, other.step_id)
        return StepsBack(step_id, is_apart=self.is_apart and other.is_apart)
