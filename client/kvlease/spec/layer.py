"""Own the common part of every kind of layer: a name, a block, a page and how pages are spaced."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import ClassVar, Self

from kvlease._checks import check_range, check_text, check_type, field_types, shown
from kvlease.errors import InvalidError
from kvlease.geometry import round_up
from kvlease.units import BYTES_MAX, TOKENS_MAX

Bounds = Mapping[str, tuple[int, int]]
"""The least and the most that each count may be, by field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec(ABC):
    """What one layer keeps; two specs are equal if they keep the same, whatever the layers' names and backends."""

    kind: ClassVar[str]
    """The kind's name on the wire."""
    keeps_all: ClassVar[bool] = False
    """Whether the layer keeps every token of a request until the request ends."""
    is_latent: ClassVar[bool] = False
    """Whether one latent vector stands for K and V of all heads (multi-head latent attention)."""
    is_prefix_cacheable: ClassVar[bool] = True
    """Whether another request with the same prefix may use what the layer keeps."""
    has_token_slots: ClassVar[bool] = True
    """Whether each token is written to a slot of its own."""
    bounds: ClassVar[Bounds] = {
        "tokens_per_block": (1, TOKENS_MAX),
        "bytes_per_page_padded": (1, BYTES_MAX),
    }
    """The least and the most of every count that the class adds to its parents' counts; None is always allowed."""

    name: str = field(compare=False)
    """The layer's name, unique in its model."""
    backend: str = field(default="", compare=False)
    """The attention backend that reads the pages; it decides which kernel blocks are possible. Empty: any."""
    tokens_per_block: int | None = None
    """Tokens that one block covers; None takes the plan's."""
    bytes_per_page_padded: int | None = None
    """Bytes of a page if it must be larger than its content; None: as large as the content."""
    block_stride_multiple_bytes: int | None = None
    """The distance between the pages of neighbouring blocks is a multiple of this; None: any distance."""
    block_stride_multiple_tokens: int | None = None
    """The same multiple, given as the page of so many tokens; give at most one of the two."""

    @property
    def is_context_sharded(self) -> bool:
        """Whether context parallel ranks keep different tokens."""
        return False

    @property
    @abstractmethod
    def head_slots(self) -> int:
        """Heads that a page has room for."""

    @property
    @abstractmethod
    def states_per_block(self) -> int:
        """States that a head keeps of one block; a token's K and V are one state."""

    @property
    @abstractmethod
    def bytes_per_state(self) -> int:
        """Bytes of one state of one head."""

    @property
    @abstractmethod
    def bytes_per_element(self) -> int:
        """Bytes of one element of a view."""

    @property
    def content_bytes_per_page(self) -> int:
        """head_slots * states_per_block * bytes_per_state."""
        return self.head_slots * self.states_per_block * self.bytes_per_state

    @property
    def bytes_per_page(self) -> int:
        """Bytes of the layer's part of one block, padding included."""
        return self.bytes_per_page_padded or self.content_bytes_per_page

    @property
    def block_stride_multiple(self) -> int:
        """Bytes of which the distance between neighbouring blocks' pages is a multiple."""
        if self.block_stride_multiple_bytes is not None:
            return self.block_stride_multiple_bytes
        if self.block_stride_multiple_tokens is None:
            return 1
        tokens = gcd(self.block_stride_multiple_tokens, self.block_tokens)
        if tokens == self.block_tokens:
            return 1
        return replace(self, tokens_per_block=tokens).bytes_per_page

    @property
    def padded_bytes_per_page(self) -> int:
        """round_up(bytes_per_page, block_stride_multiple): the stride of blocks if layers are outermost."""
        return round_up(self.bytes_per_page, self.block_stride_multiple)

    @property
    def block_tokens(self) -> int:
        """tokens_per_block, which is known once the planner has filled it in."""
        assert self.tokens_per_block is not None, "tokens_per_block is still open"
        return self.tokens_per_block

    def explicit(self, tokens_per_block: int) -> Self:
        """Return the same layer with every default filled in; `tokens_per_block` is for a layer that gives none."""
        return replace(self, tokens_per_block=self.tokens_per_block or tokens_per_block)

    def check(self) -> None:
        """Refuse a layer that cannot be laid out.

        Raises:
            InvalidError: a field is out of range or contradicts another; the message names it and what is allowed.
        """
        self.check_fields()
        self._check_stride()

    def check_planned(self) -> None:
        """Refuse an explicit layer that has sizes but no place in a plan; `check` refuses a layer without sizes.

        Raises:
            InvalidError: the layer's states do not fill its blocks.
        """
        assert self.tokens_per_block is not None, "tokens_per_block is still open"

    def check_fields(self, path: str = "") -> None:
        """Refuse a field of another type or out of range, each field by itself; `path` is the layer's place.

        Raises:
            InvalidError: the message names the field with its path, the layer, the value and what is allowed.
        """
        prefix = f"{path}." if path else ""
        check_type(f"{prefix}name", self.name, str)
        check_text(f"{prefix}name", self.name, least=1)
        of = self._of
        for name, hint in field_types(type(self)).items():
            value = getattr(self, name)
            check_type(f"{prefix}{name}", value, hint, of=of)
            if isinstance(value, str):
                check_text(f"{prefix}{name}", value, of=of)
        for kind in reversed(type(self).__mro__):
            bounds: Bounds = vars(kind).get("bounds", {})
            for name, (least, most) in bounds.items():
                value = getattr(self, name)
                if value is not None:
                    check_range(f"{prefix}{name}", value, least, most, of=of)
        self._check_stride_range(prefix)

    @property
    def _of(self) -> str:
        """The words in a refusal that say whose field it names."""
        return f" of layer {self.name!r}"

    def _check_page(self) -> None:
        """Refuse a page that holds nothing or too much, or that is padded to less than it holds."""
        check_range(
            "content_bytes_per_page", self.content_bytes_per_page, 1, BYTES_MAX, of=self._of
        )
        padded = self.bytes_per_page_padded
        if padded is not None and padded < self.content_bytes_per_page:
            message = (
                f"bytes_per_page_padded of layer {self.name!r} is {padded}, but its content takes "
                f"{self.content_bytes_per_page} bytes; set it to at least that, or leave it out"
            )
            raise InvalidError(
                message,
                resource="bytes_per_page_padded",
                rule="padding_below_content",
                need=self.content_bytes_per_page,
                available=padded,
            )
        check_range("bytes_per_page", self.bytes_per_page, 1, BYTES_MAX, of=self._of)

    def _check_stride(self) -> None:
        """Refuse a block stride's multiple that is given twice."""
        if self.block_stride_multiple_bytes is None or self.block_stride_multiple_tokens is None:
            return
        message = f"layer {self.name!r} sets its block stride's multiple both in bytes and in tokens; set only one"
        raise InvalidError(
            message, resource="block_stride_multiple_bytes", rule="block_stride_multiple_twice"
        )

    def _check_stride_range(self, prefix: str) -> None:
        """Refuse a block stride's multiple that is not positive, which has a rule of its own, or that is too large."""
        for name, value, most in (
            ("block_stride_multiple_bytes", self.block_stride_multiple_bytes, BYTES_MAX),
            ("block_stride_multiple_tokens", self.block_stride_multiple_tokens, TOKENS_MAX),
        ):
            if value is None:
                continue
            if value <= 0:
                message = (
                    f"{prefix}{name}{self._of} is {shown(value)}; it must be positive, or left out"
                )
                raise InvalidError(
                    message, resource=prefix + name, rule="block_stride_multiple_not_positive"
                )
            check_range(prefix + name, value, 1, most, of=self._of)
