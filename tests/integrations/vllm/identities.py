"""Own the proof of what an identity tells: change one setting of vLLM's configuration at a time, and compare.

Runs as a script with the reference engine's Python, and imports nothing of the tests. Its arguments are a folder for a
model, and a JSON object with the place of each class of configuration. It prints one JSON object: for each class, the
names of its settings, and for each of these the fields of the identity that a change of it alone changes.
"""

import copy
import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ENVIRONMENT = "environment"


def main() -> None:
    """Print what each setting changes."""
    from transformers import LlamaConfig  # noqa: PLC0415

    folder, places = Path(sys.argv[1]), json.loads(sys.argv[2])
    small = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    }  # fmt: skip
    for name, theta in (("model", 10_000.0), ("elsewhere", 500_000.0)):
        config = LlamaConfig(**small, architectures=["LlamaForCausalLM"])
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        config.save_pretrained(folder / name)
    scales = folder / "scales.json"
    scales.write_text("{}")
    base = _whole(str(folder / "model"))
    others = {
        "hf_config_path": str(folder / "elsewhere"),
        "mm_encoder_fp8_scale_path": str(scales),
        "draft_load_config": SimpleNamespace(load_format="pt"),
    }
    del places[_ENVIRONMENT]
    found = {name: _changes(base, name, path, others) for name, path in places.items()}
    found[_ENVIRONMENT] = _variables(base)
    sys.stdout.write(f"{json.dumps(found)}\n")


def _whole(model: str) -> Any:
    """Return a configuration that has every optional part."""
    from vllm.config import DiffusionConfig, MultiModalConfig  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415

    settings = {
        "model": model, "dtype": "float32", "skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": 512,
    }  # fmt: skip
    base = EngineArgs(**settings, enable_lora=True).create_engine_config()
    draft = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    drafting = EngineArgs(**settings, speculative_config=draft).create_engine_config()
    # Checks of the whole would refuse these parts beside each other.
    _put(base, "speculative_config", drafting.speculative_config)
    _put(base, "diffusion_config", DiffusionConfig(canvas_length=32))
    _put(base.model_config, "multimodal_config", MultiModalConfig())
    base.model_config.hf_text_config.rope_parameters = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1024,
    }
    return base


def _changes(base: Any, class_name: str, path: str, others: dict[str, Any]) -> dict[str, Any]:
    """Return, for each setting of a configuration, which fields of the identity its change changes."""
    from kvlease.integrations.vllm.identity.namespace import Identity  # noqa: PLC0415

    own = Identity.of(base)
    parts = path.split(".") if path else []
    part = base
    for name in parts:
        part = getattr(part, name)
    assert type(part).__name__ == class_name
    found: dict[str, list[str]] = {}
    arguments = inspect.signature(type(part)).parameters
    for name in dict.fromkeys([*arguments, *(one.name for one in fields(part))]):
        if not hasattr(part, name):
            found[name] = []
            continue
        value = others.get(name) or _other(getattr(part, name))
        changed = Identity.of(_with(base, parts, name, value))
        found[name] = [said.partition(" ")[0] for said in own.differing(changed.model_digest)]
    return found


def _variables(base: Any) -> dict[str, list[str]]:
    """Return, for each variable of the environment that vLLM reads, which fields of the identity it changes."""
    from kvlease.integrations.vllm.identity.namespace import Identity  # noqa: PLC0415
    from vllm import envs  # noqa: PLC0415

    own, had = Identity.of(base), dict(os.environ)
    found: dict[str, list[str]] = {}
    for name in envs.environment_variables:
        os.environ[name] = "1" if os.environ.get(name) != "1" else "0"
        changed = Identity.of(base)
        os.environ.clear()
        os.environ.update(had)
        found[name] = [said.partition(" ")[0] for said in own.differing(changed.model_digest)]
    return found


def _with(base: Any, parts: list[str], name: str, value: Any) -> Any:
    """Return a configuration that differs from `base` in one setting."""
    whole = part = copy.copy(base)
    for one in parts:
        inner = copy.copy(getattr(part, one))
        _put(part, one, inner)
        part = inner
    _put(part, name, value)
    return whole


def _put(part: Any, name: str, value: Any) -> None:
    """Set a value without the checks of its class, which would refuse some of them on this machine."""
    object.__setattr__(part, name, value)


def _other(value: Any) -> Any:
    """Return another value of the same kind."""
    import torch  # noqa: PLC0415

    if value is None:
        return "other"
    if isinstance(value, Enum):
        return next(one for one in type(value) if one is not value)
    others: list[tuple[Any, Callable[[], Any]]] = [
        (bool, lambda: not value),
        ((int, float), lambda: value + 100_003),
        (str, lambda: f"{value}-other"),
        (torch.dtype, lambda: torch.float16),
        (list, lambda: [*value, "other"]),
        (dict, lambda: {**value, "other": "other"}),
        (object, lambda: copy.copy(value)),
    ]
    return next(made() for kind, made in others if isinstance(value, kind))


if __name__ == "__main__":
    main()
