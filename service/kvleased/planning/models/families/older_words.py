"""Own decoders whose configs say plain attention in words of their own: Falcon, StarCoder, MPT, DBRX and ChatGLM."""

from kvlease.geometry import exact_div
from kvlease.spec import LayerSpec
from kvleased.planning.models.families.decoder import attend
from kvleased.planning.models.model import Heads, Model
from kvleased.planning.models.parsing import Config


def falcon(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of Falcon: grouped heads in the new decoder, else one head for all if `multi_query` is set.

    Raises:
        InvalidError: a field is missing.
    """
    config = model.config
    num_heads = config.count("num_attention_heads", "n_head")
    if config.flag("new_decoder_architecture"):
        num_kv_heads = config.count("num_kv_heads", "n_head_kv")
    else:
        num_kv_heads = 1 if config.flag("multi_query", default=True) else num_heads
    return attend(model, _even_heads(config, num_heads, num_kv_heads))


def bigcode(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of the first StarCoder: one head of K and V if `multi_query` is set, which is the default.

    Raises:
        InvalidError: a field is missing.
    """
    config = model.config
    num_heads = config.count("num_attention_heads", "n_head")
    is_shared = config.flag("multi_query", default=True)
    return attend(model, _even_heads(config, num_heads, 1 if is_shared else num_heads))


def mpt(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of MPT and DBRX, whose field `attn_config` gives the heads of K and V.

    Raises:
        InvalidError: a field is missing.
    """
    config = model.config
    num_heads = config.count("num_attention_heads", "n_heads")
    if config.model_type == "dbrx":
        grouped = config.inner("attn_config").count("kv_n_heads")
    elif config.value("attn_config") is not None:
        grouped = config.inner("attn_config").given_count("kv_n_heads") or num_heads
    else:
        grouped = num_heads
    return attend(model, _even_heads(config, num_heads, grouped))


def chatglm(model: Model) -> tuple[LayerSpec, ...]:
    """Return the layers of ChatGLM, whose `kv_channels` is the head size.

    Raises:
        InvalidError: a field is missing.
    """
    config = model.config
    num_heads = config.count("num_attention_heads")
    is_grouped = config.flag("multi_query_attention")
    return attend(
        model,
        Heads(
            num_kv_heads=config.count("multi_query_group_num") if is_grouped else num_heads,
            head_size=config.count("kv_channels"),
        ),
    )


def _even_heads(config: Config, num_heads: int, num_kv_heads: int) -> Heads:
    width = config.count("hidden_size", "n_embd", "n_embed", "d_model")
    head_size = exact_div(width, num_heads, what="hidden_size over num_attention_heads")
    return Heads(num_kv_heads=num_kv_heads, head_size=head_size)
