"""Own what the examples of the modes share: an engine with a connector, asked the same question twice."""

import argparse
from typing import Any

from vllm import LLM, SamplingParams

QUESTION = "You are a careful assistant. " * 60 + "What is a cache?"


def main(connector: str, **settings: Any) -> None:
    """Ask twice, and print how much of the question was found; run it again to see what outlives the engine."""
    parser = argparse.ArgumentParser(description=f"Serve two requests with {connector}.")
    parser.add_argument("model", help="a directory or a name, as vLLM takes it")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=256 << 20)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--socket", default="", help="the daemon's; the user's own by default")
    words = parser.parse_args()
    engine = LLM(
        words.model,
        enforce_eager=True,
        kv_cache_memory_bytes=words.kv_cache_memory_bytes,
        max_model_len=words.max_model_len,
        kv_transfer_config={
            "kv_connector": connector,
            "kv_connector_module_path": "kvlease.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": words.socket, **settings},
        },
    )
    for turn in ("first", "second"):
        (answer,) = engine.generate([QUESTION], SamplingParams(max_tokens=16, temperature=0))
        asked = len(answer.prompt_token_ids or ())
        print(f"{turn}: {answer.num_cached_tokens} of {asked} tokens were found")
