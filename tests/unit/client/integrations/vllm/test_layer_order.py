"""Laws of the order of layers: the daemon's plan has them as vLLM has, or their blocks would be mixed up."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvlease.integrations.vllm import planning


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "layer_of", lambda name, _: SimpleNamespace(name=name))


def order(*names: str) -> list[str]:
    """Return the names of an engine's layers, given in any order, as the plan has them."""
    group = SimpleNamespace(
        layer_names=list(names),
        kv_cache_spec=SimpleNamespace(kv_cache_specs=dict.fromkeys(names)),
    )
    config: Any = SimpleNamespace(kv_cache_groups=[group])
    return [layer.name for layer in planning._layers(config)]


def test_layers_are_ordered_by_their_numbers() -> None:
    """The tenth layer comes behind the second, and layers of EAGLE, numbered on, behind the model's."""
    names = ["model.layers.10.attn", "model.layers.2.attn", "eagle.layers.11.attn"]

    assert order(*names) == [names[1], names[0], names[2]]


def test_layers_of_a_draft_model_come_behind() -> None:
    """A draft that is a model of its own numbers its layers from 0, but vLLM has them behind the model's."""
    model = [f"model.layers.{number}.attn" for number in range(3)]
    draft = [f"draft_model.model.layers.{number}.attn" for number in range(2)]

    assert order(*draft, *model) == [*model, *draft]
