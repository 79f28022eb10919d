"""Own the metadata that carries a step's id to the ranks and back to the scheduler."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """The step that the ranks are to carry out."""

    step_id: int
    parts: bool = False
    """Whether the ranks must make their caches private to this engine before they carry out the step."""


@dataclass(frozen=True, slots=True)
class StepsBack(KVConnectorWorkerMetadata):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """The newest step that all ranks asked so far have carried out."""

    step_id: int
    is_apart: bool = False
    """Whether the caches of these ranks are private to this engine."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepsBack":
        """Return what holds for both."""
        assert isinstance(other, StepsBack), "all ranks have the same connector"
        step_id = min(self.step_id, other.step_id)
        return StepsBack(step_id, is_apart=self.is_apart and other.is_apart)
