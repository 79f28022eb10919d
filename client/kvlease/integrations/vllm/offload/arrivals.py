"""Own the waiting requests that are asked for ahead, together with one that is looked up.

Each request is asked for ahead once. Blocks found are held as if the request had been looked up itself. If nothing was
found, that answer counts for a few steps only, because blocks may be there by the request's turn.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvlease.integrations.vllm.offload.absences import Absent
from kvlease.integrations.vllm.offload.requests import Seeker

KNOWS_POSITIONS: Final = "_offload_key_positions" in {one.name for one in fields(ReqContext)}
"""Whether a request's context lists all of its keys before the first is looked up. If it does not, keys are gathered as
they are looked up, answered with RETRY, and asked for together at the end of the step: one step later, in the same
number of calls."""

_STATE: Final = getattr(offloading, "RequestOffloadState", None)
_NAMES: Final = offloading.OffloadingConnectorScheduler.__init__.__code__.co_names
CAN_TELL_LATER: Final = (
    KNOWS_POSITIONS
    and all(hasattr(_STATE, name) for name in ("update_block_id_groups", "update_offload_keys"))
    and {"_current_batch_allocated_block_ids", "_req_status"} <= set(_NAMES)
)
"""Whether vLLM's scheduler can be told of a request, and of its blocks, after the request's first step."""

REQUESTS_MAX: Final = 16
KEYS_MAX: Final = 2_048
"""Keys of one exchange beyond which no further request is asked for ahead."""

STEPS_MAX: Final = 8
"""Steps for which the answer that nothing was found counts."""

Question = tuple[Seeker, list[OffloadKey]]


class Arrivals:
    """The requests not asked for yet, and those that were asked for ahead."""

    def __init__(self) -> None:
        """Begin with no requests."""
        self._contexts: dict[str, ReqContext] = {}
        self._early: dict[str, tuple[Seeker, int]] = {}
        self._step = 0

    def __repr__(self) -> str:
        """Show life: how many requests arrived, and how many were asked for ahead."""
        return f"<Arrivals {len(self._contexts)} came, {len(self._early)} asked for ahead>"

    def note(self, context: ReqContext) -> None:
        """Note a request that arrived."""
        self._contexts[context.req_id] = context

    def of(self, request_id: str) -> ReqContext | None:
        """Return the context of a request that was not asked for yet."""
        return self._contexts.get(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that are asked for, run or have ended."""
        if not self._contexts and not self._early:
            return
        for request_id in request_ids:
            self._contexts.pop(request_id, None)
            self._early.pop(request_id, None)

    def early(
        self, num_keys: int, seeker: Callable[[ReqContext], Seeker], absent: Absent
    ) -> list[Question]:
        """Return what to ask for ahead, besides `num_keys` keys; the requests in it count as asked for ahead.

        A request whose first key is surely absent needs no question, and waits for its turn.
        """
        questions: list[Question] = []
        for request_id, context in list(self._contexts.items())[:REQUESTS_MAX]:
            keys = list(context._offload_key_positions)  # noqa: SLF001 - probed at import; there is no other list
            if all(absent(keys[:1])):
                continue
            num_keys += len(keys)
            if num_keys > KEYS_MAX:
                break
            del self._contexts[request_id]
            if keys:
                asking = seeker(context)
                self._early[request_id] = (asking, self._step)
                questions.append((asking, keys))
        return questions

    def end_step(self, holding: Collection[str], reloading: Collection[str]) -> list[Seeker]:
        """Note the end of a step; return the requests that were asked for ahead a few steps ago and found nothing."""
        self._step += 1
        if not self._early:
            return []
        due = [name for name, (_, step) in self._early.items() if self._step - step >= STEPS_MAX]
        asked = [(name, self._early.pop(name)[0]) for name in due]
        return [seeker for name, seeker in asked if name not in holding and name not in reloading]
