"""Own the kinds of attention that keep K and V of single tokens."""

from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

from kvlease._checks import shown
from kvlease.errors import InvalidError
from kvlease.geometry import floor_div
from kvlease.spec.elements import QUANTISATIONS, bytes_of, head_slots_of, packed_bytes_per_state
from kvlease.spec.layer import Bounds, LayerSpec
from kvlease.units import BYTES_MAX, TOKENS_MAX

_HEADS_MAX: Final = 2**16
_HEAD_SIZE_MAX: Final = 2**20
_STATES_PER_TOKEN_MAX: Final = 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """What all attention layers have: heads, and the states of these heads."""

    bounds: ClassVar[Bounds] = {
        "num_kv_heads": (1, _HEADS_MAX),
        "head_size": (1, _HEAD_SIZE_MAX),
        "head_size_v": (0, _HEAD_SIZE_MAX),
        "num_head_slots": (1, _HEADS_MAX),
        "bytes_per_state_packed": (1, BYTES_MAX),
        "tokens_per_state": (1, TOKENS_MAX),
        "states_per_token": (1, _STATES_PER_TOKEN_MAX),
        "tensor_shards_max": (1, _HEADS_MAX),
    }

    has_one_head: ClassVar[bool] = False
    """Whether one vector stands for all heads, so that there are no heads to count."""

    num_kv_heads: int
    """Heads after any tensor parallel split."""
    head_size: int
    """Elements of one K head."""
    head_size_v: int | None = None
    """Elements of one V head; None means `head_size`, 0 means that there is no V."""
    dtype: str
    """Element type of the pages."""
    quantisation: str = "none"
    """How K and V are packed into `dtype`."""
    num_head_slots: int | None = None
    """Heads that a page has room for; None: as many as the quantisation needs for `num_kv_heads`."""
    bytes_per_state_packed: int | None = None
    """Bytes of one head's state if the backend packs it in its own way; None: from head sizes, dtype, quantisation."""
    tokens_per_state: int = 1
    """Tokens that are compressed into one state."""
    states_per_token: int = 1
    """States that one token has, if it stands for several positions of an encoder."""
    tensor_shards_max: int | None = None
    """Tensor parallel ranks that can keep different heads; None: all. Further ranks keep copies."""
    is_context_sharded: bool = True
    """Whether context parallel ranks keep different tokens."""

    @property
    def head_slots(self) -> int:
        """num_head_slots, else the head slots that the quantisation needs."""
        return self.num_head_slots or head_slots_of(self.quantisation, self.num_kv_heads)

    @property
    def states_per_block(self) -> int:
        """floor(tokens_per_block / tokens_per_state), or tokens_per_block * states_per_token."""
        return floor_div(self.block_tokens, self.tokens_per_state) * self.states_per_token

    @property
    def bytes_per_state(self) -> int:
        """bytes_per_state_packed, else the bytes that follow from head sizes, dtype and quantisation."""
        if self.bytes_per_state_packed is not None:
            return self.bytes_per_state_packed
        return packed_bytes_per_state(
            self.quantisation, self.head_size, self.value_head_size, self.bytes_per_element
        )

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element of `dtype`."""
        return bytes_of(self.dtype)

    @property
    def value_head_size(self) -> int:
        """Elements of one V head."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    def explicit(self, tokens_per_block: int) -> Self:
        """Return the same layer with every default filled in."""
        return replace(
            self,
            tokens_per_block=self.tokens_per_block or tokens_per_block,
            head_size_v=self.value_head_size,
        )

    def check(self) -> None:
        """Refuse a layer that cannot be laid out.

        Raises:
            InvalidError: a field is out of range or contradicts another; the message names it and what is allowed.
        """
        super(AttentionSpec, self).check()
        bytes_of(self.dtype, self._of)
        if self.quantisation not in QUANTISATIONS:
            message = (
                f"quantisation{self._of} must be one of {', '.join(QUANTISATIONS)}, "
                f"not {shown(self.quantisation)}"
            )
            raise InvalidError(message, resource="quantisation", rule="unknown_quantisation")
        self._check_states()
        if self.tokens_per_block is not None:
            self._check_block()

    def check_planned(self) -> None:
        """Refuse an explicit layer that has sizes but no place in a plan; `check` refuses a layer without sizes.

        Raises:
            InvalidError: rule tokens_per_state_does_not_divide: the last tokens of every block would be lost.
        """
        tokens, per_state = self.block_tokens, self.tokens_per_state
        whole = tokens - tokens % per_state
        if whole == tokens:
            return
        message = (
            f"tokens_per_state{self._of} is {per_state}, which does not divide the {tokens} tokens of its block; "
            f"the nearest blocks that it divides have {whole} and {whole + per_state} tokens"
        )
        raise InvalidError(
            message,
            resource="tokens_per_block",
            rule="tokens_per_state_does_not_divide",
            need=per_state,
            available=tokens,
        )

    def _check_states(self) -> None:
        """Refuse contradictory numbers of states, and several heads for one latent vector."""
        if self.tokens_per_state > 1 and self.states_per_token > 1:
            message = (
                f"layer {self.name!r} sets tokens_per_state {self.tokens_per_state} and states_per_token "
                f"{self.states_per_token}; only one can be above 1"
            )
            raise InvalidError(
                message, resource="tokens_per_state", rule="states_per_token_contradict"
            )
        if self.num_kv_heads > 1 and self.has_one_head:
            message = (
                f"num_kv_heads{self._of} is {self.num_kv_heads}; a layer of kind {self.kind} keeps one latent vector "
                "for all heads: leave it out, or set it to 1"
            )
            raise InvalidError(
                message,
                resource="num_kv_heads",
                rule="latent_has_one_head",
                need=self.num_kv_heads,
                limit=1,
            )

    def _check_block(self) -> None:
        """Refuse compression that leaves a block without a state, padding below the content, and pages too large."""
        if self.block_tokens < self.tokens_per_state:
            message = (
                f"layer {self.name!r} keeps one state per {self.tokens_per_state} tokens, but a block covers only "
                f"{self.block_tokens}; set tokens_per_block to a multiple of {self.tokens_per_state}"
            )
            raise InvalidError(
                message,
                resource="tokens_per_block",
                rule="block_without_states",
                need=self.tokens_per_state,
                available=self.block_tokens,
            )
        if self.block_stride_multiple == 0:
            message = (
                f"block_stride_multiple_tokens{self._of} is {self.block_stride_multiple_tokens}, whose greatest "
                f"common divisor with the block's tokens is below the {self.tokens_per_state} of one state; set it to "
                f"a multiple of {self.tokens_per_state}"
            )
            raise InvalidError(
                message,
                resource="block_stride_multiple_tokens",
                rule="block_stride_multiple_without_states",
                need=self.tokens_per_state,
                available=self.block_stride_multiple_tokens,
            )
        self._check_page()


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(AttentionSpec):
    """A layer that keeps K and V of every token of a request."""

    kind: ClassVar[str] = "full_attention"
    keeps_all: ClassVar[bool] = True
    bounds: ClassVar[Bounds] = {"window_tokens": (1, TOKENS_MAX), "chunk_tokens": (1, TOKENS_MAX)}

    window_tokens: int | None = None
    """Tokens of the window that attention looks at, although all tokens are kept; None: no window."""
    chunk_tokens: int | None = None
    """Tokens of the chunk that attention looks at, although all tokens are kept; None: no chunks."""
    is_causal: bool = True
    """Whether a token sees only the tokens before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkAttention(FullAttention):
    """Full attention with learnt first states that every request attends to."""

    kind: ClassVar[str] = "sink_attention"
    bounds: ClassVar[Bounds] = {"sink_tokens": (1, TOKENS_MAX)}

    sink_tokens: int
    """States that every request attends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedWindow(FullAttention):
    """Attention over a window, for which older tokens are kept, too."""

    kind: ClassVar[str] = "retained_window"
    bounds: ClassVar[Bounds] = {"retained_window_tokens": (1, TOKENS_MAX)}

    retained_window_tokens: int
    """Tokens of the window that attention looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(AttentionSpec):
    """A layer that keeps only the last tokens; blocks before the window are given back while a request runs."""

    kind: ClassVar[str] = "sliding_window"
    bounds: ClassVar[Bounds] = {
        "window_tokens": (1, TOKENS_MAX),
        "retained_tokens": (0, TOKENS_MAX),
    }

    window_tokens: int
    """Tokens that attention looks at, the newest included."""
    retained_tokens: int = 0
    """Tokens before the window that must stay, in case speculative tokens are taken back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocal(AttentionSpec):
    """A layer that keeps only the tokens of the newest chunk."""

    kind: ClassVar[str] = "chunked_local"
    bounds: ClassVar[Bounds] = {"chunk_tokens": (1, TOKENS_MAX)}

    chunk_tokens: int
    """Tokens of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention(AttentionSpec):
    """A decoder's layer that keeps K and V of the encoder's output, which are written once.

    A cache with such layers finds no prefixes: what later layers keep of equal tokens depends on the encoder's input.
    """

    kind: ClassVar[str] = "cross_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOnly(AttentionSpec):
    """A layer that keeps nothing between steps; it has sizes, but no place in a plan."""

    kind: ClassVar[str] = "encoder_only"
