"""Read configs for tests: fixtures by name, with fields changed, or small configs from their fields."""

import json
from pathlib import Path
from typing import Any

from kvlease.plan import EngineInputs, ParallelInputs
from kvlease.spec import LayerSpec
from kvleased.planning.models import layers_of

FIXTURES = next(
    parent / "fixtures" / "configs"
    for parent in Path(__file__).parents
    if (parent / "fixtures" / "configs").is_dir()
)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def config_text(name: str, **changes: object) -> str:
    """Return the text of a fixture with some fields changed; None takes a field away."""
    return changed(json.loads((FIXTURES / f"{name}.json").read_text()), **changes)


def changed(config: dict[str, Any], **changes: object) -> str:
    """Return the text of a config with some fields changed; None takes a field away."""
    return json.dumps(
        {name: value for name, value in (config | changes).items() if value is not None}
    )


def layers(
    text: str, kv_dtype: str = "", *, ranks: int = 1, mode: str = "none", tokens: int = 16
) -> tuple[LayerSpec, ...]:
    """Return the layers of a config on one of so many tensor ranks, and check each."""
    found = layers_of(
        text,
        kv_dtype,
        parallel=ParallelInputs(tensor_ranks=ranks),
        engine=EngineInputs(state_mode=mode),
        tokens_per_block=tokens,
    )
    for layer in found:
        layer.check()
    return found
