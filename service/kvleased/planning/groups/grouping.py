"""Own the groups of a model: which layers share a table, and the spec that each layer has there."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kvlease.errors import InvalidError
from kvlease.layout import Layout
from kvlease.plan import EngineInputs
from kvlease.spec import (
    MLA,
    AttentionSpec,
    ChunkedLocal,
    EncoderOnly,
    HiddenState,
    LayerSpec,
    SlidingWindow,
    SlidingWindowMLA,
)
from kvleased.planning.demand import ranks_sharing
from kvleased.planning.groups.equal_pages import equal_page_groups, of_one_spec
from kvleased.planning.groups.hidden_states import with_hidden_states
from kvleased.planning.groups.merging import mergeable, share_table
from kvleased.planning.groups.packed_groups import packed_groups
from kvleased.planning.groups.page_unity import with_equal_pages
from kvleased.planning.groups.promotion import keeping_all, promoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share a table."""

    layers: tuple[LayerSpec, ...]
    """The layers in the order of their pages in a block, each with its final spec."""
    is_drafted: bool = False
    """Whether a draft model reads the group."""
    spec_kept: LayerSpec | None = None
    """The group's spec on a rank that keeps none of its layers; None if there are layers."""

    @property
    def spec(self) -> LayerSpec:
        """The first layer's spec; the spec of every layer if has_equal_layers."""
        if self.layers:
            return self.layers[0]
        assert self.spec_kept is not None, "a group without layers lost its spec"
        return self.spec_kept

    @property
    def has_equal_layers(self) -> bool:
        """Whether all layers have the same spec."""
        first = self.spec
        return all(layer == first for layer in self.layers)

    @property
    def tokens_per_block(self) -> int:
        """Tokens that one block covers on one rank."""
        return self.spec.block_tokens

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one layer's page, or of all layers' pages together if the layers differ."""
        if self.has_equal_layers:
            return self.spec.bytes_per_page
        return sum(layer.bytes_per_page for layer in self.layers)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers' names, in order."""
        return tuple(layer.name for layer in self.layers)

    @property
    def is_prefix_cacheable(self) -> bool:
        """Whether another request with the same prefix may use the group's blocks."""
        return self.spec.is_prefix_cacheable

    @property
    def is_context_sharded(self) -> bool:
        """Whether context parallel ranks keep different tokens."""
        return self.spec.is_context_sharded

    def tokens_on_all_ranks(self, context_ranks: int) -> int:
        """Return the tokens that one block covers on all context parallel ranks together."""
        return self.tokens_per_block * ranks_sharing(self.spec, context_ranks)

    def on(self, names: Collection[str]) -> "Group":
        """Return the group as it is on a rank that keeps the named layers; if it keeps none of them, the spec alone."""
        kept = tuple(layer for layer in self.layers if layer.name in names)
        if kept:
            return replace(self, layers=kept)
        return Group(layers=(), spec_kept=self.spec)


def group_layers(
    layers: Sequence[LayerSpec], *, layout: Layout, engine: EngineInputs
) -> tuple[Group, ...]:
    """Return the groups of a model, whose layers are given in model order with all defaults filled in.

    The first possible way is taken: one group of one spec; one group of one table; if blocks are outermost, groups of
    any pages; groups of equal pages, after pages were made equal. Hidden states follow in groups of their own.

    Raises:
        InvalidError: a layer keeps nothing (rule unregistered_spec), several windows are recorded
            (window_size_conflict), all layers must be one group and cannot (promotion_failed), or their pages cannot be
            made equal (page_size_not_unifiable).
    """
    _refuse_unkept(layers)
    layers = _retaining(layers, max(0, engine.lookahead_tokens - 1))
    if engine.one_group:
        layers = _promoted_apart(layers)
    if not layers:
        return ()
    if mergeable(layers):
        return (Group(layers=of_one_spec(layers)),)
    if share_table(layers):
        return (Group(layers=tuple(layers)),)
    return _several_groups(layers, layout, engine)


def _several_groups(
    layers: Sequence[LayerSpec], layout: Layout, engine: EngineInputs
) -> tuple[Group, ...]:
    """Return the groups of layers that do not share one table."""
    hidden = [layer for layer in layers if isinstance(layer, HiddenState)]
    kept = [layer for layer in layers if not isinstance(layer, HiddenState)]
    pages = {layer.bytes_per_page for layer in kept}
    if not kept or (layout.is_block_outermost and len(pages) > 1):
        own = tuple((layer,) for layer in hidden)
        return _marked((*packed_groups(kept), *own), kept or hidden, engine)
    try:
        unified = with_equal_pages(kept)
    except InvalidError:
        whole = _windows_kept_whole(layers)
        if not whole:
            raise
        return (Group(layers=whole),)
    return _marked(with_hidden_states(equal_page_groups(unified), hidden), layers, engine)


def _marked(
    groups: Sequence[Sequence[LayerSpec]], layers: Sequence[LayerSpec], engine: EngineInputs
) -> tuple[Group, ...]:
    """Return the groups, and mark those that a draft model reads; it has the last layer."""
    drafted = {layers[-1].name} if engine.drafts_with_last_layer else set()
    return tuple(
        Group(layers=tuple(group), is_drafted=bool(drafted) and _is_drafted(group, drafted))
        for group in groups
    )


def _windows_kept_whole(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return latent layers and plain windows as one group that keeps every token; nothing if that is impossible."""
    if (
        not any(isinstance(layer, MLA) for layer in layers)
        or not any(isinstance(layer, SlidingWindow) for layer in layers)
        or any(isinstance(layer, HiddenState | SlidingWindowMLA | ChunkedLocal) for layer in layers)
    ):
        return ()
    whole = keeping_all(layers)
    return whole if share_table(whole) else ()


def _promoted_apart(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers in model order, with one table for those that every context rank keeps and one for the rest."""
    replicated = [layer for layer in layers if _is_replicated(layer)]
    others = [layer for layer in layers if not _is_replicated(layer)]
    by_name = {layer.name: layer for layer in (*promoted(replicated), *promoted(others))}
    return tuple(by_name[layer.name] for layer in layers)


def _is_replicated(layer: LayerSpec) -> bool:
    return isinstance(layer, AttentionSpec) and not layer.is_context_sharded


def _retaining(layers: Sequence[LayerSpec], num_tokens: int) -> tuple[LayerSpec, ...]:
    """Return the layers; windows also keep the tokens that drafts may take back."""
    return tuple(
        replace(layer, retained_tokens=num_tokens)
        if isinstance(layer, SlidingWindow | SlidingWindowMLA)
        and layer.retained_tokens < num_tokens
        else layer
        for layer in layers
    )


def _refuse_unkept(layers: Sequence[LayerSpec]) -> None:
    for layer in layers:
        if isinstance(layer, EncoderOnly):
            message = f"layer {layer.name!r} is of kind {layer.kind}, which keeps nothing between steps; leave it out"
            raise InvalidError(message, resource="layers", rule="unregistered_spec")


def _is_drafted(group: Sequence[LayerSpec], drafted: Collection[str]) -> bool:
    """Tell whether a group has a draft model's layer, or one that decodes several tokens at once."""
    return any(
        layer.name in drafted or (isinstance(layer, MLA) and layer.decodes_several_tokens)
        for layer in group
    )
