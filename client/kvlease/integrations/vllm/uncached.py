"""Own why vLLM keeps nothing of an engine's requests for later ones; then no mode can keep anything either."""

from typing import Any, Final

_KEEPS_NOTHING: Final = "EncoderOnly"
"""Part of the names of vLLM's specs for layers that look at one request's own tokens only, all at once."""


def why_uncached(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return why an engine caches no prefixes, and what to change, if anything can be; empty if it caches them.

    vLLM switches prefix caching off for models and platforms that it expects to go wrong after a cached prefix, but
    asks a connector for prefixes all the same.
    """
    specs = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    if all(_KEEPS_NOTHING in spec for spec in specs):
        return (
            "the model has no cache to keep, as none of its layers reads what earlier steps computed; "
            "run it without kvlease"
        )
    if vllm_config.cache_config.enable_prefix_caching:
        return ""
    model = getattr(vllm_config, "model_config", None)
    if not getattr(model, "is_prefix_caching_supported", True):
        return "vLLM supports no prefix caching for this model, so there is no cache to keep; run it without kvlease"
    return "prefix caching is off; switch it on with --enable-prefix-caching"
