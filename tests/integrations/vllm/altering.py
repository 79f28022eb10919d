"""Own a model that changes its configuration as it is built, which only the processes of the ranks see."""

from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM


class AlteringLlama(LlamaForCausalLM):
    """A Llama that writes into its configuration, as Llama 4 does."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        vllm_config.model_config.hf_config.attn_temperature_tuning = True
        super().__init__(vllm_config=vllm_config, prefix=prefix)
