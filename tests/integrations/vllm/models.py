"""Own the tiny random models that engines of tests run, with a tokenizer of plain words; made once into build/.

Tests call `path_of`; the reference engine's Python makes the models by running this file as a script.
"""

import fcntl
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
REFERENCE: Final = ROOT / ".venv-vllm" / "bin" / "python"
_FOLDER: Final = ROOT / "build" / "vllm" / "models"
_VERSION: Final = 1
"""Raise this whenever a model below changes, so that no old one is used."""

VOCABULARY_TOKENS: Final = 512
WINDOW_TOKENS: Final = 64
"""The window of the hybrid's sliding layers, and the chunk of the model with chunks."""
POSITIONS_MAX: Final = 131_072 + 1_024
_EVERY: Final[dict[str, Any]] = {
    "dtype": "float32",
    "vocab_size": VOCABULARY_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS_MAX,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama", {**_EVERY, "num_hidden_layers": 4}),
    "shallow": ("Llama", {**_EVERY, "num_hidden_layers": 1}),
    "stout": (
        "Llama",
        {
            **_EVERY,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "head_dim": 64,
            "initializer_range": 0.02,
        },
    ),
    "thin": (
        "Llama",
        {**_EVERY, "num_hidden_layers": 1, "num_key_value_heads": 1, "num_attention_heads": 1},
    ),
    "hybrid": (
        "Gemma3Text",
        {
            **_EVERY,
            "num_hidden_layers": 6,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
            "sliding_window": WINDOW_TOKENS,
            "query_pre_attn_scalar": 32,
        },
    ),
    "chunked": (
        "Llama4Text",
        {
            **_EVERY,
            "num_hidden_layers": 4,
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "attention_chunk_size": WINDOW_TOKENS,
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "num_local_experts": 2,
        },
    ),
    "latent": (
        "DeepseekV2",
        {
            **_EVERY,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            # The sizes that the engine's CPU kernel supports.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "head_dim": 64,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            # If positions are not scaled, the engine's CPU kernel for them misreads a part of a latent vector.
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 2_048,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
            # All layers are dense.
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
        },
    ),
    "recurrent": (
        "FalconH1",
        {
            **_EVERY,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
        },
    ),
}
"""Each model's family in Transformers and its configuration; the weights come from a seed."""
EAGLE_HEAD: Final = "eagle"
"""The head that guesses for `shallow`: its layer is the model's own, so that nearly all of its guesses are right if the
KV that it reads is."""
ADAPTER: Final = "adapter"
"""A LoRA adapter of `llama`, another one for each seed."""
ADAPTER_RANK: Final = 8
_CLASSES: Final = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM"),
    "Gemma3Text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Llama4Text": ("Llama4TextConfig", "Llama4ForCausalLM"),
    "DeepseekV2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "FalconH1": ("FalconH1Config", "FalconH1ForCausalLM"),
}


def path_of(name: str, seed: int = 0) -> Path:
    """Return the directory of a model, made if missing; models of different seeds differ in weights."""
    folder = _FOLDER / f"{name}-{seed}-v{_VERSION}"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with (_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            half = folder.with_suffix(".half")
            command = [str(REFERENCE), __file__, name, str(seed), str(half)]
            subprocess.run(command, check=True, capture_output=True)
            half.rename(folder)
    return folder


def make(name: str, seed: int, folder: Path) -> None:
    """Make a model; runs with the reference engine's Python."""
    import torch  # noqa: PLC0415  # tests have none, or another one
    import transformers  # noqa: PLC0415

    if name == ADAPTER:
        _write_adapter(seed, folder)
        return
    family, words = MODELS["shallow" if name == EAGLE_HEAD else name]
    config_class, model_class = (getattr(transformers, one) for one in _CLASSES[family])
    torch.manual_seed(seed)
    model = model_class(config_class(**words)).eval()
    if name in ("shallow", EAGLE_HEAD):
        # The head's layer does not normalize its input, so that the model's must not need it.
        embedded = model.model.embed_tokens.weight.data
        embedded /= embedded.square().mean(-1, keepdim=True).sqrt()
    if name == EAGLE_HEAD:
        _write_head(model, folder)
    else:
        model.save_pretrained(folder)
    _write_tokenizer(folder)


def _write_adapter(seed: int, folder: Path) -> None:
    """Write an adapter of all queries, keys and values."""
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    torch.manual_seed(seed)
    words = MODELS["llama"][1]
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    weights = {}
    for layer, name in product(range(words["num_hidden_layers"]), [*heads, "v_proj"]):
        num_out = words["head_dim"] * words[heads.get(name, "num_key_value_heads")]
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{prefix}.lora_A.weight"] = 0.3 * torch.randn(ADAPTER_RANK, words["hidden_size"])
        weights[f"{prefix}.lora_B.weight"] = 0.3 * torch.randn(num_out, ADAPTER_RANK)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": [*heads, "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "llama",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def _write_head(model: Any, folder: Path) -> None:
    """Write a head that has a model's first layer, and passes it the next token without what the model made of all."""
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    weights = {
        name.removeprefix("model."): weight.clone()
        for name, weight in model.state_dict().items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.eye(model.config.hidden_size, 2 * model.config.hidden_size)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer in which token 7 is the word w7, and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    words = {f"w{token}": token for token in range(VOCABULARY_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    make(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
