"""Own what the demo asks for: the model, and requests whose prompts share long prefixes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CACHE: Final = "demo"
TOKENS_PER_BLOCK: Final = 16
DEVICE_BLOCKS: Final = 80
"""Fewer than the requests fill in all, so that cached blocks have to leave the device."""
HOST_BYTES: Final = 16 << 20
MODEL_DIGEST: Final = "demo-llama-seed-0"

_MODEL: Final[dict[str, object]] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    # Wide enough that the next token depends on the whole prompt, and that the best two are never close to a tie.
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MODEL_SEED: Final = 0
_PROMPT_SEED: Final = 0
_PREFIX_TOKENS: Final = (144, 208, 300)
"""Tokens of the prefix that all requests of a family share."""
_FAMILIES: Final = {
    "share-first": (0, 1, 2),
    "share-second": (0, 1, 2),
    "share-together": (0, 1, 2, 0),
    "preempt-victim": (2,),
    "preempt-others": (1, 0),
    "spill": (1, 2),
    "kill-victim": (0,),
    "kill-others": (1, 2, 0),
    "restart-held": (1, 2),
    "restart-after": (0, 1, 2),
}
"""The family of each request, by the part that it plays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, and how many tokens shall follow it."""

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int

    @property
    def reusable_tokens(self) -> int:
        """Tokens in full blocks of the prompt, short of its last token, which is always computed."""
        return (len(self.token_ids) - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


def requests(*, is_quick: bool = False) -> dict[str, list[Request]]:
    """Return the requests of each part; a quick demo has the first two parts of a kind at most, and shorter answers."""
    source = random.Random(_PROMPT_SEED)  # noqa: S311 - no secret
    vocabulary = range(3, 1024)
    prefixes = [source.choices(vocabulary, k=num_tokens) for num_tokens in _PREFIX_TOKENS]
    made: dict[str, list[Request]] = {}
    for part, families in _FAMILIES.items():
        made[part] = []
        for index, family in enumerate(families):
            suffix = source.choices(vocabulary, k=source.randint(16, 96))
            max_new_tokens = source.randint(40, 64)
            request = Request(
                request_id=f"{part}-{index}",
                token_ids=(*prefixes[family], *suffix),
                max_new_tokens=32 if is_quick else max_new_tokens,
            )
            if not is_quick or index == 0 or part == "restart-held":
                made[part].append(request)
    return made


def model_config() -> str:
    """Return the model's config.json."""
    return json.dumps(_MODEL)


def build_model(device: str) -> LlamaForCausalLM:
    """Build the model on a device, which is named as torch does; its random weights are the same in every process."""
    # Imported here, for the driver needs no torch.
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(_MODEL_SEED)
    return LlamaForCausalLM(LlamaConfig(**_MODEL)).eval().to(device)
