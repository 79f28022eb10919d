"""Own the kinds of layer that keep one latent vector of a token instead of K and V."""

from dataclasses import dataclass
from typing import ClassVar

from kvlease.geometry import round_up
from kvlease.spec.attention import AttentionSpec, FullAttention
from kvlease.spec.layer import Bounds
from kvlease.units import BYTES_MAX, TOKENS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class MLA(FullAttention):
    """Multi-head latent attention that keeps every token or, with tokens_per_state above 1, compressed states."""

    kind: ClassVar[str] = "mla"
    is_latent: ClassVar[bool] = True
    has_one_head: ClassVar[bool] = True
    bounds: ClassVar[Bounds] = {"page_multiple_bytes": (1, BYTES_MAX)}

    num_kv_heads: int = 1
    head_size_v: int | None = 0
    tensor_shards_max: int | None = 1
    packed_format: str = ""
    """The backend's name for how a state is packed, such as fp8_ds_mla; empty: in the plain way."""
    page_multiple_bytes: int | None = None
    """Each page is padded to a multiple of so many bytes."""
    model_version: str = ""
    """The model family whose kernels read the pages, if kernels of another family cannot."""
    role: str = "sparse"
    """The use of the states: "sparse" attention or its "indexer"."""
    leads_index_group: bool = False
    """Whether the layers that follow reuse this layer's selection of tokens."""
    decodes_several_tokens: bool = False
    """Whether speculative decoding reads several new tokens at once without a causal mask."""

    @property
    def bytes_per_page(self) -> int:
        """The content rounded up to page_multiple_bytes; if that adds nothing, bytes_per_page_padded or the content."""
        return _aligned_page(self, self.page_multiple_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenState(MLA):
    """A layer's hidden states of every token, kept for a reader outside the model."""

    kind: ClassVar[str] = "hidden_state"
    has_one_head: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowMLA(AttentionSpec):
    """Latent attention, or the state of its compressor, that keeps only the last tokens."""

    kind: ClassVar[str] = "sliding_window_mla"
    is_latent: ClassVar[bool] = True
    has_one_head: ClassVar[bool] = True
    bounds: ClassVar[Bounds] = {
        "window_tokens": (1, TOKENS_MAX),
        "retained_tokens": (0, TOKENS_MAX),
        "page_multiple_bytes": (1, BYTES_MAX),
    }

    num_kv_heads: int = 1
    head_size_v: int | None = 0
    tensor_shards_max: int | None = 1
    window_tokens: int
    """Tokens that attention looks at, the newest included."""
    retained_tokens: int = 0
    """Tokens before the window that must stay, in case speculative tokens are taken back."""
    packed_format: str = ""
    """The backend's name for how a state is packed; empty: in the plain way."""
    page_multiple_bytes: int | None = None
    """Each page is padded to a multiple of so many bytes."""
    model_version: str = ""
    """The model family whose kernels read the pages."""
    is_replayed: bool = False
    """Whether the window is computed anew after a prefix hit; then its blocks are not cached."""

    @property
    def is_prefix_cacheable(self) -> bool:  # type: ignore[override]  # decided by the instance
        """False if the window is replayed, else True."""
        return not self.is_replayed

    @property
    def bytes_per_page(self) -> int:
        """The content rounded up to page_multiple_bytes; if that adds nothing, bytes_per_page_padded or the content."""
        return _aligned_page(self, self.page_multiple_bytes)


def _aligned_page(spec: AttentionSpec, multiple_bytes: int | None) -> int:
    content = spec.content_bytes_per_page
    aligned = round_up(content, multiple_bytes or 1)
    return aligned if aligned != content else spec.bytes_per_page_padded or content
