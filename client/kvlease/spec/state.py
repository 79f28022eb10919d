"""Own the kinds of layer that keep states of a fixed size, however long the request is."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final

from kvlease._checks import check_range, check_text
from kvlease.errors import InvalidError
from kvlease.spec.attention import AttentionSpec
from kvlease.spec.elements import bytes_of
from kvlease.spec.layer import Bounds, LayerSpec
from kvlease.units import TOKENS_MAX

_STATES_MAX: Final = 16
_DIMENSIONS_MAX: Final = 8
_EXTRA_BLOCKS_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace(LayerSpec):
    """A recurrent layer (Mamba, gated delta net, short convolution, linear attention): a page is a state."""

    kind: ClassVar[str] = "state_space"
    bounds: ClassVar[Bounds] = {
        "num_speculative_blocks": (0, _EXTRA_BLOCKS_MAX),
        "num_checkpoint_blocks": (0, _EXTRA_BLOCKS_MAX),
        "checkpoint_multiple_tokens": (1, TOKENS_MAX),
    }

    shapes: tuple[tuple[int, ...], ...]
    """The tensors of a state, after any tensor parallel split."""
    dtypes: tuple[str, ...]
    """The element type of each tensor."""
    num_speculative_blocks: int = 0
    """States besides the current one, for speculative tokens that may be taken back."""
    num_checkpoint_blocks: int = 0
    """States besides the current one, for checkpoints while a prompt is computed."""
    checkpoint_multiple_tokens: int | None = None
    """Checkpoints lie at multiples of so many tokens; None: at block boundaries."""
    is_replicated: bool = False
    """Whether all tensor parallel ranks keep the same state."""

    @property
    def head_slots(self) -> int:
        """One: a state has no heads."""
        return 1

    @property
    def states_per_block(self) -> int:
        """One."""
        return 1

    @property
    def bytes_per_state(self) -> int:
        """The sum over tensors of prod(shape) * bytes_per_element."""
        return sum(
            prod(shape) * bytes_of(dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def bytes_per_element(self) -> int:
        """One: a view of states is a view of bytes, because a state's tensors may have different types."""
        return 1

    def check(self) -> None:
        """Refuse a layer that cannot be laid out.

        Raises:
            InvalidError: a field is out of range or contradicts another; the message names it and what is allowed.
        """
        super(StateSpace, self).check()
        if len(self.dtypes) != len(self.shapes):
            message = (
                f"layer {self.name!r} has {len(self.shapes)} shapes and {len(self.dtypes)} dtypes; "
                "give one dtype for each shape"
            )
            raise InvalidError(
                message,
                resource="dtypes",
                rule="dtypes_not_of_shapes",
                need=len(self.shapes),
                available=len(self.dtypes),
            )
        for dtype in self.dtypes:
            bytes_of(dtype, self._of)
        self._check_page()

    def check_fields(self, path: str = "") -> None:
        """Refuse a field of another type or out of range, each field by itself; `path` is the layer's place.

        Raises:
            InvalidError: the message names the field with its path, the layer, the value and what is allowed.
        """
        super(StateSpace, self).check_fields(path)
        shapes = f"{path}.shapes" if path else "shapes"
        check_range(f"the length of {shapes}", len(self.shapes), 1, _STATES_MAX, of=self._of)
        for index, shape in enumerate(self.shapes):
            field = f"{shapes}[{index}]"
            check_range(f"the length of {field}", len(shape), 1, _DIMENSIONS_MAX, of=self._of)
            for axis, extent in enumerate(shape):
                check_range(f"{field}[{axis}]", extent, 1, TOKENS_MAX, of=self._of)
        for index, dtype in enumerate(self.dtypes):
            check_text(
                f"{path}.dtypes[{index}]" if path else f"dtypes[{index}]", dtype, of=self._of
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingState(AttentionSpec):
    """A ring of the newest states in one block, such as a compressor's input; it is overwritten in place."""

    kind: ClassVar[str] = "ring_state"
    is_prefix_cacheable: ClassVar[bool] = False
    has_token_slots: ClassVar[bool] = False
