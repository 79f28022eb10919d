"""Own what one layer keeps of a token; where it lies in memory is the plan's business.

Only full attention is described so far; further kinds join the union `LayerSpec`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

from kvlease.errors import InvalidError
from kvlease.units import checked_count

BYTES_PER_ELEMENT: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
"""Every element type of a cache, with its bytes."""

_HEADS_MAX: Final = 2**16
_HEAD_SIZE_MAX: Final = 2**16
_NAME_CHARACTERS_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """A layer that keeps K and V of every token of a request."""

    kind: ClassVar[str] = "full_attention"

    name: str
    """Unique in its model."""
    num_kv_heads: int
    """Heads after any tensor parallel split."""
    head_size: int
    """Elements of one K head."""
    head_size_v: int = 0
    """Elements of one V head; 0 means `head_size`."""
    dtype: str

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """num_kv_heads * (head_size + head_size_v) * bytes_per_element."""
        elements_per_head = self.head_size + (self.head_size_v or self.head_size)
        return self.num_kv_heads * elements_per_head * self.bytes_per_element

    def explicit(self) -> Self:
        """Return the same layer with nothing left to a default."""
        return replace(self, head_size_v=self.head_size_v or self.head_size)

    def check(self) -> None:
        """Refuse a layer that cannot be laid out.

        Raises:
            InvalidError: a field is out of range or names an unknown dtype.
        """
        if not 0 < len(self.name) <= _NAME_CHARACTERS_MAX or not self.name.isprintable():
            message = f"a layer's name must be 1 to {_NAME_CHARACTERS_MAX} printable characters"
            raise InvalidError(
                message, resource="name", need=len(self.name), limit=_NAME_CHARACTERS_MAX
            )
        checked_count("num_kv_heads", self.num_kv_heads, least=1, most=_HEADS_MAX)
        checked_count("head_size", self.head_size, least=1, most=_HEAD_SIZE_MAX)
        checked_count("head_size_v", self.head_size_v, most=_HEAD_SIZE_MAX)
        if self.dtype not in BYTES_PER_ELEMENT:
            message = f"dtype {self.dtype[:40]!r} of layer {self.name!r} is not one of {', '.join(BYTES_PER_ELEMENT)}"
            raise InvalidError(message, resource="dtype")


LayerSpec = FullAttention
"""What one layer keeps: the union of all kinds."""
