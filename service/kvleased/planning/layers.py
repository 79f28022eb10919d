"""Own which layers each rank keeps, with all defaults filled in; how layers share tables is `grouping`'s."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlease.errors import InvalidError
from kvlease.plan import PlanInputs, RankInputs
from kvlease.spec import LayerSpec
from kvlease.units import BYTES_MAX, checked_count
from kvleased.planning.limits import PLANNED_RANKS_MAX
from kvleased.planning.models import LAYERS_MAX, layers_of, model_facts, pipeline_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayers:
    """What one rank keeps, and the memory that it has for that."""

    device_bytes: int
    """0 means not measured."""
    layers: tuple[LayerSpec, ...]


def layers_by_rank(inputs: PlanInputs) -> tuple[RankLayers, ...]:
    """Return the layers and the memory of every rank, checked and explicit; ranks with equal layers share one tuple.

    Raises:
        InvalidError: the inputs give no layers or give them twice, or a layer cannot be laid out.
    """
    common = _common_layers(inputs)
    given_ranks = inputs.ranks or _stage_ranks(inputs, common)
    checked_count("ranks", len(given_ranks), least=1, most=PLANNED_RANKS_MAX)
    by_identity: dict[int, tuple[LayerSpec, ...]] = {}
    by_content: dict[object, tuple[LayerSpec, ...]] = {}
    ranks = []
    for rank in given_ranks:
        given = _given_layers(rank, common)
        if id(given) not in by_identity:
            layers = _explicit(given, inputs.tokens_per_block)
            # Specs compare equal whatever the layers' names and backends, so compare those as well.
            content = (tuple((layer.name, layer.backend) for layer in layers), layers)
            by_identity[id(given)] = by_content.setdefault(content, layers)
        device_bytes = inputs.device_bytes if rank.device_bytes is None else rank.device_bytes
        checked_count("device_bytes", device_bytes, most=BYTES_MAX)
        ranks.append(RankLayers(device_bytes=device_bytes, layers=by_identity[id(given)]))
    return tuple(ranks)


def union_of(ranks: Sequence[RankLayers]) -> tuple[LayerSpec, ...]:
    """Return the layers of all ranks, each once, in order of first appearance.

    Raises:
        InvalidError: two ranks keep different things under one name.
    """
    union: dict[str, LayerSpec] = {}
    for layers in {id(rank.layers): rank.layers for rank in ranks}.values():
        for layer in layers:
            known = union.setdefault(layer.name, layer)
            if known != layer:
                message = (
                    f"two ranks have different specs of layer {layer.name!r}, with pages of {known.bytes_per_page} and "
                    f"{layer.bytes_per_page} bytes; give all ranks the same spec of it"
                )
                raise InvalidError(
                    message,
                    resource="ranks",
                    rule="layer_spec_differs_across_workers",
                    need=known.bytes_per_page,
                    available=layer.bytes_per_page,
                )
    return tuple(union.values())


def _common_layers(inputs: PlanInputs) -> tuple[LayerSpec, ...]:
    """Return the layers of the ranks that give none of their own."""
    brings_all = bool(inputs.ranks) and all(
        rank.layers or rank.keeps_nothing for rank in inputs.ranks
    )
    num_sources = bool(inputs.layers) + bool(inputs.model_config)
    if num_sources != 1 and not (brings_all and num_sources == 0):
        what = (
            "are both given; give one of them"
            if num_sources
            else "are both missing; give one of them"
        )
        message = f"layers and model_config {what}"
        raise InvalidError(message, resource="layers")
    if inputs.kv_dtype and not inputs.model_config:
        message = "kv_dtype can only be given with model_config; layers have their own dtype"
        raise InvalidError(message, resource="kv_dtype")
    if inputs.model_config:
        return layers_of(
            inputs.model_config,
            inputs.kv_dtype,
            parallel=inputs.parallel,
            engine=inputs.engine,
            tokens_per_block=inputs.tokens_per_block,
        )
    return inputs.layers


def _stage_ranks(inputs: PlanInputs, common: tuple[LayerSpec, ...]) -> tuple[RankInputs, ...]:
    """Return the ranks stage by stage; the tensor parallel ranks of a pipeline stage have equal layers."""
    parallel = inputs.parallel
    if parallel.pipeline_ranks == 1:
        return (RankInputs(),) * parallel.tensor_ranks
    num_layers = model_facts(inputs.model_config).num_hidden_layers if inputs.model_config else None
    stages = pipeline_stages(common, parallel.pipeline_ranks, num_layers=num_layers)
    return tuple(
        rank
        for stage in stages
        for rank in (RankInputs(layers=stage, keeps_nothing=not stage),) * parallel.tensor_ranks
    )


def _given_layers(rank: RankInputs, common: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    if not rank.keeps_nothing:
        return rank.layers or common
    if rank.layers:
        message = "a rank has both keeps_nothing and layers; give one or the other"
        raise InvalidError(message, resource="keeps_nothing", need=0, available=len(rank.layers))
    return ()


def _explicit(given: tuple[LayerSpec, ...], tokens_per_block: int) -> tuple[LayerSpec, ...]:
    """Check the layers and return them with all defaults filled in."""
    checked_count("layers", len(given), most=LAYERS_MAX)
    names: set[str] = set()
    layers = []
    for layer in given:
        if layer.name in names:
            message = f"two layers are named {layer.name!r}; the name of a layer must be unique in its model"
            raise InvalidError(message, resource="name", rule="layer_name_not_unique")
        names.add(layer.name)
        layer.check()
        explicit = layer.explicit(tokens_per_block)
        if layer.tokens_per_block is None:
            explicit.check()
        explicit.check_planned()
        layers.append(explicit)
    return tuple(layers)
