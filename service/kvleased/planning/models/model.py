"""Own how the layers of one tensor rank are made: heads and states split over ranks, K and V in the cache's type."""

from dataclasses import dataclass
from typing import Any, Final

from kvlease.errors import InvalidError
from kvlease.geometry import exact_div
from kvlease.plan import EngineInputs
from kvlease.spec import ChunkedLocal, CrossAttention, FullAttention, SlidingWindow, StateSpace
from kvlease.units import TOKENS_MAX
from kvleased.planning.models.defaults import KV_HEADS_OF_CLASS
from kvleased.planning.models.kv_format import KVFormat, kv_format, model_dtype
from kvleased.planning.models.parsing import Config

_HEAD_FIELDS: Final = ("num_attention_heads", "n_head", "n_heads")
"""Fields for the heads of Q; `num_heads` may also count those of a recurrent layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The K and V heads of a layer before they are split."""

    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    """None means as large as K's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A config, and what else decides how its layers are kept."""

    config: Config
    kv_dtype: str
    tensor_ranks: int
    tokens_per_block: int
    engine: EngineInputs

    @property
    def dtype(self) -> str:
        """The element type of the weights.

        Raises:
            InvalidError: it is not known.
        """
        return model_dtype(self.config.dtype, self.kv_dtype)

    @property
    def kv(self) -> KVFormat:
        """How K and V are kept.

        Raises:
            InvalidError: there is no such way, or the model's own type is not known.
        """
        return kv_format(self.kv_dtype, self.config.dtype)

    @property
    def speculative_tokens(self) -> int:
        """Tokens that may be taken back; each needs a state of its own."""
        return self.engine.lookahead_tokens

    def check_heads(self) -> None:
        """Refuse ranks among which the heads of Q cannot be split, as attention is, whatever is kept of K and V.

        Raises:
            InvalidError: the ranks cannot share them evenly.
        """
        total = self.config.value(*_HEAD_FIELDS)
        if isinstance(total, int) and total > 0 and total % self.tensor_ranks:
            message = (
                f"the model's {total} attention heads cannot be shared evenly by {self.tensor_ranks} tensor ranks; "
                f"tensor_ranks must divide {total}"
            )
            raise InvalidError(
                message,
                resource="tensor_ranks",
                rule="ranks_do_not_divide",
                need=self.tensor_ranks,
                limit=min(total, TOKENS_MAX),
            )

    def full(self, name: str, heads: Heads) -> FullAttention:
        """Return a layer that keeps every token."""
        return FullAttention(**self._attention(name, heads))

    def sliding(self, name: str, heads: Heads, window_tokens: int) -> SlidingWindow:
        """Return a layer that keeps a window."""
        return SlidingWindow(**self._attention(name, heads), window_tokens=window_tokens)

    def chunked(self, name: str, heads: Heads, chunk_tokens: int) -> ChunkedLocal:
        """Return a layer that keeps the newest chunk."""
        return ChunkedLocal(**self._attention(name, heads), chunk_tokens=chunk_tokens)

    def cross(self, name: str, heads: Heads) -> CrossAttention:
        """Return a layer that keeps the encoder's output."""
        return CrossAttention(**self._attention(name, heads))

    def state(
        self,
        name: str,
        *tensors: tuple[tuple[int, ...], str],
        num_speculative_blocks: int = 0,
        num_checkpoint_blocks: int = 0,
        checkpoint_multiple_tokens: int | None = None,
    ) -> StateSpace:
        """Return a recurrent layer, made from shapes that are already split and their element types."""
        return StateSpace(
            name=name,
            tokens_per_block=self.tokens_per_block,
            shapes=tuple(shape for shape, _ in tensors),
            dtypes=tuple(dtype for _, dtype in tensors),
            num_speculative_blocks=num_speculative_blocks,
            num_checkpoint_blocks=num_checkpoint_blocks,
            checkpoint_multiple_tokens=checkpoint_multiple_tokens,
        )

    def split(self, total: int, what: str) -> int:
        """Return one rank's share of something of which every rank keeps a different part.

        Raises:
            InvalidError: the ranks cannot share it evenly; the message names the nearest numbers that can.
        """
        if total % self.tensor_ranks:
            raise _unsplittable(total, what, self.tensor_ranks)
        return exact_div(total, self.tensor_ranks)

    def heads_of_rank(self, num_kv_heads: int) -> int:
        """Return how many K and V heads one rank has: its share, or one if heads are fewer than ranks and are copied.

        Raises:
            InvalidError: ranks would keep different numbers of heads, or heads different numbers of copies.
        """
        if num_kv_heads < self.tensor_ranks and self.tensor_ranks % num_kv_heads == 0:
            return 1
        return self.split(num_kv_heads, "num_key_value_heads")

    def _attention(self, name: str, heads: Heads) -> dict[str, Any]:
        kv = self.kv
        if kv.packed_format:
            message = f"kv_dtype {kv.packed_format!r} packs a latent of DeepSeek, but layer {name!r} keeps K and V"
            raise InvalidError(message, resource="kv_dtype", rule="kv_dtype_not_for_model")
        head_size_v = heads.head_size if heads.head_size_v is None else heads.head_size_v
        return {
            "name": name,
            "tokens_per_block": self.tokens_per_block,
            "num_kv_heads": self.heads_of_rank(heads.num_kv_heads),
            "head_size": heads.head_size,
            "head_size_v": head_size_v,
            "dtype": kv.dtype,
            "quantisation": kv.quantisation,
            "tensor_shards_max": heads.num_kv_heads,
        }


def heads_of(config: Config) -> Heads:
    """Return the heads of a config that says them in the usual words.

    Raises:
        InvalidError: a field is missing, or heads do not divide.
    """
    num_heads = config.count(*_HEAD_FIELDS, "num_heads")
    num_kv_heads = config.given_count("num_key_value_heads") or _all_heads(config, num_heads)
    exact_div(num_heads, num_kv_heads, what="num_attention_heads over num_key_value_heads")
    head_size = config.given_count("head_dim", "attention_head_dim") or exact_div(
        config.count("hidden_size", "n_embd", "d_model"),
        num_heads,
        what="hidden_size over num_attention_heads",
    )
    return Heads(
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=config.optional_count("v_head_dim"),
    )


def _all_heads(config: Config, num_heads: int) -> int:
    """Return as many K and V heads as Q heads, which most architectures mean if the config does not say.

    Raises:
        InvalidError: the architecture's class has a default of its own, which no published config relies on.
    """
    if config.model_type in KV_HEADS_OF_CLASS:
        raise config.lacks("num_key_value_heads")
    return num_heads


def _unsplittable(total: int, what: str, ranks: int) -> InvalidError:
    divisors = [divisor for divisor in range(1, min(total, 2 * ranks) + 1) if total % divisor == 0]
    nearest = sorted(sorted(divisors, key=lambda divisor: abs(divisor - ranks))[:3])
    message = (
        f"{what}: {total} cannot be shared evenly by {ranks} tensor ranks; "
        f"set {' or '.join(f'tensor_ranks={number}' for number in nearest)}"
    )
    return InvalidError(
        message, resource="tensor_ranks", rule="ranks_do_not_divide", need=ranks, limit=total
    )
