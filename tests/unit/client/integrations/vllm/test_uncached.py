"""Laws of engines that cache no prefixes: the advice is one that can help."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from kvlease.integrations.vllm.uncached import why_uncached


class FullAttentionSpec:
    """A layer that keeps its blocks, by vLLM's name."""


class EncoderOnlyAttentionSpec:
    """A layer that keeps nothing, by vLLM's name."""


def told(specs: list[object], *, is_on: bool = False, is_supported: bool = True) -> str:
    """Return what is said of an engine."""
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=is_on),
        model_config=SimpleNamespace(is_prefix_caching_supported=is_supported),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return why_uncached(config, SimpleNamespace(kv_cache_groups=groups))


def test_an_engine_that_caches_prefixes_is_not_refused() -> None:
    """What caches prefixes has something to keep, also beside layers that keep nothing."""
    assert told([FullAttentionSpec()], is_on=True) == ""
    assert told([EncoderOnlyAttentionSpec(), FullAttentionSpec()], is_on=True) == ""


def test_prefix_caching_is_switched_on_only_where_that_helps() -> None:
    """The advice is to switch prefix caching on if vLLM supports that for the model."""
    assert "--enable-prefix-caching" in told([FullAttentionSpec()])


@pytest.mark.parametrize(
    ("specs", "is_supported", "wanted"),
    [
        pytest.param([], False, "no cache to keep, as none of its layers", id="no layers"),
        pytest.param(
            [EncoderOnlyAttentionSpec()], True, "no cache to keep, as none", id="an encoder's"
        ),
        pytest.param(
            [FullAttentionSpec()], False, "supports no prefix caching.*no cache", id="pooling"
        ),
    ],
)
def test_a_model_without_a_cache_is_said_to_have_none(
    specs: list[object], is_supported: bool, wanted: str
) -> None:
    """A model for which vLLM keeps no prefixes is told from an engine whose prefix caching was switched off."""
    message = told(specs, is_supported=is_supported)

    assert "--enable" not in message
    assert re.search(wanted, message)
