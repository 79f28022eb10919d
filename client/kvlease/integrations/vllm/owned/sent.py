"""Own what one exchange of owned memory carries, from when it is sent until its answer is heard."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvlease.integrations.vllm.fence import Write
from kvlease.magazine import ExchangeOrder


class Sent(NamedTuple):
    """The writes, keys and retracts of an exchange, in the order in which they are answered."""

    writes: Sequence[Write]
    keys: Sequence[bytes]
    retracts: Sequence[int]
    order: ExchangeOrder

    @classmethod
    def of(
        cls,
        writes: Sequence[Write],
        keys: Sequence[bytes],
        retracts: Sequence[int],
        num_absent: int,
    ) -> Self | None:
        """Return what publishes and retracts blocks and asks for absent ones; None if there is nothing of it."""
        if not (writes or retracts or num_absent):
            return None
        order = ExchangeOrder(
            publish_blocks=_ids([write.block_id for write in writes]),
            publish_keys=b"".join(keys),
            publish_positions=np.array([write.position for write in writes], np.uint32),
            retract_blocks=_ids(retracts),
            take_running=num_absent,
        )
        return cls(writes, keys, retracts, order)

    @property
    def block_ids(self) -> list[int]:
        """The blocks whose standing the answer tells."""
        return [*(write.block_id for write in self.writes), *self.retracts]


def _ids(block_ids: Sequence[int]) -> NDArray[np.int32]:
    return np.array(block_ids, np.int32)
