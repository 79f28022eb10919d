"""Own what a Hugging Face config.json says of a model's layers; whatever it leaves uncertain is refused.

No weights, no network, no torch: the JSON is read as it is, because the config classes of Transformers load torch.
"""

from typing import Final

from kvlease.plan import EngineInputs, ParallelInputs
from kvlease.spec import LayerSpec
from kvlease.units import TOKENS_MAX, checked_count
from kvleased.planning.limits import PLANNED_RANKS_MAX
from kvleased.planning.models.facts import ModelFacts, model_facts
from kvleased.planning.models.hybrid import with_equal_pages
from kvleased.planning.models.kv_format import KV_DTYPES
from kvleased.planning.models.model import Model
from kvleased.planning.models.parsing import LAYERS_MAX, parsed
from kvleased.planning.models.refusals import missing_encoder_tokens, no_layers
from kvleased.planning.models.registry import family_of
from kvleased.planning.models.stages import pipeline_stages

__all__ = [
    "KV_DTYPES",
    "LAYERS_MAX",
    "ModelFacts",
    "layers_of",
    "missing_encoder_tokens",
    "model_facts",
    "pipeline_stages",
]

_UNSPLIT: Final = ParallelInputs()
_USUAL_ENGINE: Final = EngineInputs()


def layers_of(
    model_config: str,
    kv_dtype: str = "",
    *,
    parallel: ParallelInputs = _UNSPLIT,
    engine: EngineInputs = _USUAL_ENGINE,
    tokens_per_block: int = 16,
) -> tuple[LayerSpec, ...]:
    """Return the layers of the model that the text of a config.json describes, as one tensor rank keeps them.

    `kv_dtype` is how K and V are kept, one of KV_DTYPES; if empty, the model's own way is taken. Layers have blocks of
    `tokens_per_block`, except where a family's kernels or a recurrent state need larger ones.

    Raises:
        InvalidError: the text is not a config.json, lacks a field, contradicts itself, or its architecture is not
            known.
    """
    checked_count("tensor_ranks", parallel.tensor_ranks, least=1, most=PLANNED_RANKS_MAX)
    checked_count("tokens_per_block", tokens_per_block, least=1, most=TOKENS_MAX)
    checked_count("lookahead_tokens", engine.lookahead_tokens, most=TOKENS_MAX)
    config = parsed(model_config)
    model = Model(
        config=config,
        kv_dtype=kv_dtype,
        tensor_ranks=parallel.tensor_ranks,
        tokens_per_block=tokens_per_block,
        engine=engine,
    )
    layers = with_equal_pages(model, family_of(config)(model))
    model.check_heads()
    if not layers:
        raise no_layers(config.model_type)
    return layers
