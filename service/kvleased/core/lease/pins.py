"""Own what is known of the pins of a cache; who may have another one is told in `keeping`."""

from kvlease.ids import PinId
from kvleased.core.ids import Ids


class Pins(dict[PinId, Ids]):
    """The blocks that each pin holds."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.made_at: dict[PinId, float] = {}
        """Monotonic seconds, by pin."""
