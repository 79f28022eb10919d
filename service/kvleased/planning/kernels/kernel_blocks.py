"""Own which blocks attention kernels read, and how many of them make one block; `strides` owns the bytes of a split."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import lcm
from typing import Final, TypeVar

from kvlease.errors import InvalidError
from kvlease.geometry import floor_div
from kvlease.plan import BackendInputs, TensorPlan
from kvlease.spec import AttentionSpec, EncoderOnly, LayerSpec, StateSpace

SpecT = TypeVar("SpecT", bound=LayerSpec)


def _exactly(name: str, *tokens: int) -> BackendInputs:
    return BackendInputs(name=name, exact_tokens=tokens)


def _multiples(name: str, *tokens: int) -> BackendInputs:
    return BackendInputs(name=name, multiples_tokens=tokens)


BACKENDS: Final[Mapping[str, BackendInputs]] = {
    backend.name: backend
    for backend in (
        _multiples("FLASH_ATTN", 16),
        _multiples("TRITON_ATTN", 16),
        _multiples("FLEX_ATTENTION", 16),
        _multiples("ROCM_ATTN", 16),
        _exactly("FLASHINFER", 16, 32, 64),
        _exactly("TRITON_FLASHINFER", 64),
        _exactly("B12X", 64, 128),
        _exactly("HPC_ATTN", 64),
        _exactly("TURBOQUANT", 16, 32, 64, 128),
        _exactly("ROCM_AITER_FA", 16, 32),
        _multiples("ROCM_AITER_MLA", 1),
        _multiples("CPU_ATTN", 32),
        _exactly("CPU_MLA", 16),
        _multiples("AMX_MLA", 32),
        _exactly("FLASHMLA", 64),
        _exactly("CUTLASS_MLA", 128),
        _exactly("FLASHINFER_MLA", 32, 64),
        _exactly("TOKENSPEED_MLA", 32, 64),
        _multiples("TRITON_MLA", 16),
        _multiples("FLASH_ATTN_MLA", 16),
        _multiples("FLASHMLA_SPARSE", 64),
        _multiples("FLASHINFER_MLA_SPARSE", 32, 64),
        _exactly("DEEPSEEK_V32_INDEXER", 64),
        _exactly("DEEPSEEK_V4_SPARSE", 256),
        _exactly("DEEPSEEK_V4_INDEXER", 256),
        _exactly("DEEPSEEK_V41_SPARSE", 128),
        _multiples("DEEPSEEK_SPARSE_SWA", 32),
    )
}
"""The block sizes that known backends read, by name; a caller's own entry of the same name takes precedence."""

WHOLE_BLOCK_BACKENDS: Final = frozenset({"CPU_MLA"})
"""Backends for which the planned block itself must be one of their sizes, if it is chosen for them."""


def backends_of(
    layers: Iterable[LayerSpec], given: Iterable[BackendInputs] = ()
) -> tuple[BackendInputs, ...]:
    """Return the backends that read some layers, each once; a layer that names no backend is read by any.

    Raises:
        InvalidError: rule unknown_backend, or backend_size_not_positive.
    """
    known = {**BACKENDS, **{backend.name: backend for backend in given}}
    found: dict[str, BackendInputs] = {}
    for name in dict.fromkeys(layer.backend for layer in layers if layer.backend):
        if name not in known:
            message = (
                f"backend {name[:40]!r} is not known, and no backend with that name is given; describe it with the "
                f"block sizes that it reads, or name one of {', '.join(sorted(known))}"
            )
            raise InvalidError(message, resource="backend", rule="unknown_backend")
        found[name] = known[name]
        for tokens in sizes_of(known[name]):
            if tokens <= 0:
                message = f"backend {name[:40]!r} declares a block of {tokens} tokens; sizes must be positive"
                raise InvalidError(
                    message, resource="backends", rule="backend_size_not_positive", need=tokens
                )
    return tuple(found.values())


def sizes_of(backend: BackendInputs) -> tuple[int, ...]:
    """Return all sizes that a backend declares; for a size's multiples, the size itself."""
    return backend.exact_tokens + backend.multiples_tokens


def accepts(backend: BackendInputs, tokens: int) -> bool:
    """Tell whether a backend's kernel reads blocks of so many tokens; a backend that declares no sizes reads all."""
    if not sizes_of(backend):
        return True
    return tokens in backend.exact_tokens or _divides_one(backend.multiples_tokens, tokens)


def supports_block(
    backend: BackendInputs,
    tokens: int,
    whole_block_backends: frozenset[str] = WHOLE_BLOCK_BACKENDS,
) -> bool:
    """Tell whether a backend can read a block of so many tokens: in parts, or whole if the backend requires that."""
    if not sizes_of(backend):
        return True
    if backend.name in whole_block_backends:
        return accepts(backend, tokens)
    return _divides_one(sizes_of(backend), tokens)


def preferred_block(
    backends: Sequence[BackendInputs],
    default: int = 16,
    whole_block_backends: frozenset[str] = WHOLE_BLOCK_BACKENDS,
) -> int:
    """Return the tokens of a block if nobody chose them: the default, else the least that all backends can use.

    Raises:
        InvalidError: rule no_common_block_size.
    """

    def suits(tokens: int) -> bool:
        return all(supports_block(backend, tokens, whole_block_backends) for backend in backends)

    if suits(default):
        return default
    declared = [sizes for backend in backends if (sizes := sizes_of(backend))]
    for tokens in sorted({lcm(*sizes) for sizes in product(*declared)}):
        if suits(tokens):
            return tokens
    message = (
        f"no block size suits all backends: {_listed(backends)}; choose backends that share a size"
    )
    raise InvalidError(message, resource="tokens_per_block", rule="no_common_block_size")


def common_kernel_tokens(
    block_tokens: int, backends: Sequence[BackendInputs], layers: Sequence[LayerSpec] = ()
) -> int:
    """Return the tokens of a kernel block: a whole block's if all backends read it, else of the largest part all read.

    A part of a block must hold whole states of every layer, and at least one state, because compressed layers are cut
    by states.

    Raises:
        InvalidError: rule no_common_kernel_block_size; the message names what each backend reads.
    """
    if all(accepts(backend, block_tokens) for backend in backends):
        return block_tokens
    parts = {tokens for backend in backends for tokens in backend.exact_tokens}
    per_state = lcm(*(layer.tokens_per_state for layer in _with_states(layers)))
    for tokens in sorted(parts, reverse=True):
        divides = _divides_one((tokens,), block_tokens) and _divides_one((per_state,), tokens)
        if divides and all(accepts(backend, tokens) for backend in backends):
            return tokens
    message = (
        f"no part of a block of {block_tokens} tokens can be read by all backends: {_listed(backends)}"
        + (f", in whole states of {per_state} tokens" if per_state > 1 else "")
        + f"; {_advice(block_tokens, backends, per_state)}"
    )
    raise InvalidError(
        message,
        resource="tokens_per_block",
        rule="no_common_kernel_block_size",
        available=block_tokens,
    )


def group_kernel_tokens(
    layers: Sequence[LayerSpec],
    backends: Sequence[BackendInputs],
    tensors: Sequence[TensorPlan] = (),
) -> int:
    """Return the tokens of the kernel blocks that one group's table counts in.

    That is the whole block for recurrent layers, and also if other layers' pages lie between a tensor's blocks. In that
    case `kvlease.strides.packed_view_of` maps each layer on its own.

    Raises:
        InvalidError: rule no_common_kernel_block_size.
    """
    block_tokens = layers[0].block_tokens
    is_packed = any(tensor.block_stride_bytes > tensor.layer_stride_bytes for tensor in tensors)
    if is_packed or isinstance(layers[0], StateSpace):
        return block_tokens
    return common_kernel_tokens(block_tokens, backends, layers)


def kernel_tokens_by_group(
    groups: Sequence[Sequence[LayerSpec]],
    backends: Sequence[Sequence[BackendInputs]],
    tensors: Sequence[TensorPlan],
) -> tuple[int, ...]:
    """Return the tokens of each group's kernel blocks, without groups that keep nothing between steps.

    Raises:
        InvalidError: rule no_common_kernel_block_size.
    """
    return tuple(
        group_kernel_tokens(
            layers, backends[index], [tensor for tensor in tensors if tensor.group == index]
        )
        for index, layers in enumerate(groups)
        if not isinstance(layers[0], EncoderOnly)
    )


def with_backend_stride(spec: SpecT, backend: BackendInputs) -> SpecT:
    """Return the layer with its blocks spaced for a backend that reads only fixed sizes, unless the layer says how."""
    is_given = (
        spec.block_stride_multiple_bytes is not None
        or spec.block_stride_multiple_tokens is not None
    )
    if is_given or backend.multiples_tokens or not backend.exact_tokens:
        return spec
    return replace(spec, block_stride_multiple_tokens=max(backend.exact_tokens))


def _divides_one(divisors: Iterable[int], tokens: int) -> bool:
    return any(tokens % divisor == 0 for divisor in divisors)


def _with_states(layers: Iterable[LayerSpec]) -> list[AttentionSpec]:
    return [layer for layer in layers if isinstance(layer, AttentionSpec)]


def _advice(block_tokens: int, backends: Sequence[BackendInputs], per_state: int) -> str:
    """Say which blocks near the refused one all backends can read in whole states."""
    declared = [sizes for backend in backends if (sizes := sizes_of(backend))]
    tokens_read = {lcm(*sizes) for sizes in product(*declared)}
    steps = [
        tokens
        for tokens in tokens_read | {lcm(per_state, tokens) for tokens in tokens_read}
        if _divides_one((per_state,), tokens)
        and all(accepts(backend, tokens) for backend in backends)
    ]
    if not steps:
        return "choose backends that share a size"
    below = floor_div(block_tokens, min(steps)) * min(steps)
    nearest = f"{below} or {below + min(steps)}" if below else f"a multiple of {min(steps)}"
    return f"set tokens_per_block to {nearest}"


def _listed(backends: Sequence[BackendInputs]) -> str:
    return "; ".join(
        f"{backend.name} reads "
        + ", ".join(
            [
                *map(str, backend.exact_tokens),
                *(f"multiples of {n}" for n in backend.multiples_tokens),
            ]
        )
        for backend in backends
        if sizes_of(backend)
    )
