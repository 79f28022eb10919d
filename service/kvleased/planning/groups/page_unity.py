"""Own how pages of different bytes are made equal, so that a block fits every layer; other modules make the groups."""

from collections.abc import Sequence
from dataclasses import replace

from kvlease.errors import InvalidError
from kvlease.geometry import floor_div
from kvlease.spec import MLA, LayerSpec, StateSpace
from kvleased.planning.groups.merging import settled


def with_equal_pages(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with pages as large as the largest: longer blocks if they fill it exactly, else padding.

    Raises:
        InvalidError: the page of latent attention would have to be padded (rule page_size_not_unifiable).
    """
    bytes_per_page = max(layer.bytes_per_page for layer in layers)
    stretched = {spec: _stretched(spec, bytes_per_page) for spec in dict.fromkeys(layers)}
    return tuple(
        layer
        if layer.bytes_per_page == bytes_per_page
        else replace(stretched[layer], name=layer.name, backend=layer.backend)
        for layer in layers
    )


def with_longer_blocks(spec: LayerSpec, factor: int) -> LayerSpec:
    """Return a layer whose blocks cover `factor` times the tokens, in pages of `factor` times the bytes.

    The page of a state grows only if it has a padded size, which is then multiplied by `factor`.
    """
    bytes_per_page = spec.bytes_per_page * factor
    padded = spec.bytes_per_page_padded
    longer = replace(
        spec,
        tokens_per_block=spec.block_tokens * factor,
        bytes_per_page_padded=None if padded is None else padded * factor,
    )
    if isinstance(spec, StateSpace) or longer.bytes_per_page == bytes_per_page:
        return longer
    return replace(settled(longer), bytes_per_page_padded=bytes_per_page)


def _stretched(spec: LayerSpec, bytes_per_page: int) -> LayerSpec:
    """Return a layer with pages of more bytes.

    A state does not grow with its block, so its page can only be padded. A latent page may not be padded if every token
    is kept, because kernels read such pages without gaps.
    """
    if isinstance(spec, StateSpace):
        return replace(spec, bytes_per_page_padded=bytes_per_page)
    factor = floor_div(bytes_per_page, spec.bytes_per_page)
    if factor * spec.bytes_per_page == bytes_per_page:
        return with_longer_blocks(spec, factor)
    if not isinstance(spec, MLA):
        return replace(settled(spec), bytes_per_page_padded=bytes_per_page)
    message = (
        f"layer {spec.name!r} has pages of {spec.bytes_per_page} bytes, which do not divide the largest page of "
        f"{bytes_per_page} bytes and cannot be padded; choose a layout with blocks outermost, such as BLHNC, or set "
        "tokens_per_block so that the one divides the other"
    )
    raise InvalidError(
        message,
        resource="tokens_per_block",
        rule="page_size_not_unifiable",
        need=bytes_per_page,
        available=spec.bytes_per_page,
    )
