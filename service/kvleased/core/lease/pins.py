"""Own the pins of a cache and their blocks; `keeping` tells who may have another pin."""

from kvlease.ids import PinId
from kvleased.core.ids import Ids


class Pins(dict[PinId, Ids]):
    """The blocks that each pin holds."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.made_at: dict[PinId, float] = {}
        """When each pin was made, in monotonic seconds."""
