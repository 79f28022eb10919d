"""Own how many spare blocks a keeper has ready, so that a step's requests get theirs without a call."""

from typing import Final

from kvlease.integrations.vllm.owned.terms import Needs

_DECAY_SHIFT: Final = 4
"""A peak that no step comes up to loses a sixteenth of itself with each."""


class Stock:
    """How many blocks steps take at most, of late."""

    def __init__(self, needs: Needs) -> None:
        """Begin without a step."""
        self._needs = needs
        self._num_given = 0
        self._peak_given = 0

    def __repr__(self) -> str:
        """Show life: what a step takes at most, of late."""
        return f"<Stock for {self._peak_given} blocks a step>"

    def gave(self, num_blocks: int) -> None:
        """Note that the step being scheduled takes blocks."""
        self._num_given += num_blocks

    def after_step(self) -> int:
        """Note that a step came back; return how many spare blocks to have from now on."""
        peak = self._peak_given
        self._peak_given = max(self._num_given, peak - (peak >> _DECAY_SHIFT) - 1)
        self._num_given = 0
        needs = self._needs
        return max(needs.reserve_blocks, needs.blocks_per_request + self._peak_given)
