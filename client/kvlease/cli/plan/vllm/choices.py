"""Own what vLLM 0.32 chooses if its arguments leave something open, as far as a plan depends on it.

vLLM is not asked: its defaults are written down here, and a test compares what comes of them with real engines.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvlease.cli.plan import inputs as plan_inputs
from kvlease.cli.plan.vllm.arguments import Given
from kvlease.cli.plan.vllm.recurrent import caches_prefixes, with_state_dtype
from kvlease.cli.plan.vllm.windows import with_windows
from kvlease.errors import InvalidError
from kvlease.geometry import round_up
from kvlease.plan import CachePlan, EngineInputs, ParallelInputs, PlanInputs
from kvlease.spec import ChunkedLocal, LayerSpec, SlidingWindow, StateSpace

PLATFORMS: Final = ("cuda", "cpu")
"""The platforms whose defaults are known."""

ANY_LENGTH_VARIABLE: Final = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""The variable by which vLLM takes requests beyond the model's positions; those that plan for it set it, too."""

SPLIT_CHUNKS_VARIABLE: Final = "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"
"""The variable by which, if it is 0, vLLM keeps layers that attend within chunks in one table with all others."""

_LAYOUTS: Final = {"cuda": "LBNHC", "cpu": "LBHNC"}
_BLOCK_TOKENS: Final = {"cuda": 16, "cpu": 128}
_STEP_TOKENS: Final = {"cuda": 2048, "cpu": 2048}
"""Tokens of a step of `vllm serve`, of every rank on a CPU; large GPUs have more."""
_BLOCK_MULTIPLE_TOKENS: Final = {"cuda": 1, "cpu": 32}
"""What blocks of attention are a multiple of; the backends of a GPU differ, and one is chosen there."""
_REQUESTS_MAX: Final = {"cuda": 256, "cpu": 128}
_UTILIZATION: Final = 0.92
_NULL_BLOCKS: Final = 1
_DTYPES: Final = {
    "half": "float16",
    "float": "float32",
    "float16": "float16",
    "float32": "float32",
    "bfloat16": "bfloat16",
}
_NEVER_IN_FLOAT16: Final = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""The model_type of models that vLLM refuses to compute in float16."""
_CONNECTORS_OF_GROUPS: Final = (
    "KVLeaseOffloadingConnector",
    "KVLeaseOwnedConnector",
    "KVLeaseSharedConnector",
    "OffloadingConnector",
)
"""Connectors that serve models with several groups of layers."""
_JOINING: Final = "MultiConnector"
"""The connector that joins others, and serves several groups of layers if each of them does."""
_ROPE_TYPES_COUNTED: Final = ("su", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Ways to reach further whose positions are in max_position_embeddings already."""
_POSITIONS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine on which the engine will run."""

    platform: str = "cuda"
    device_bytes: int = 0
    """Bytes of all memory of one device; 0: unknown."""
    other_bytes: int = 0
    """Bytes of it that weights, activations and graphs take, as an engine logs at its start; 0: unknown."""
    layout: str = ""
    """Order of the axes, if a backend prefers another order than the platform."""
    takes_any_length: bool = False
    """Whether vLLM is told to accept requests beyond the model's positions."""
    splits_chunks: bool = True
    """Whether layers that attend within chunks have a table of their own, as they do unless vLLM is told otherwise."""


def inputs_of(given: Given, machine: Machine) -> PlanInputs:
    """Return the inputs of the plan that vLLM would compute.

    Raises:
        InvalidError: the arguments leave something open that a plan depends on, or contradict each other.
    """
    if machine.platform not in PLATFORMS:
        message = f"--platform is {machine.platform[:40]!r}; write one of {', '.join(PLATFORMS)}"
        raise InvalidError(message, resource="platform")
    model = given.values.get("hf-config-path") or given.values.get("model")
    if not model:
        raise InvalidError("name the model after --vllm", resource="model")
    config = _config(model, given)
    longest = _longest_request(model, config, given, takes_any=machine.takes_any_length)
    return PlanInputs(
        model_config=json.dumps(config),
        kv_dtype=_kv_dtype(config, given),
        tokens_per_block=given.count("block-size") or _BLOCK_TOKENS[machine.platform],
        layout=machine.layout or _LAYOUTS[machine.platform],
        device_bytes=_device_bytes(given, machine),
        device_blocks=given.count("num-gpu-blocks-override") or 0,
        null_blocks=_NULL_BLOCKS,
        block_multiple_bytes=1,
        longest_request_tokens=longest,
        fit_longest_request=_is_auto(given),
        engine=_engine(config, given, machine, longest),
        parallel=_parallel(given),
    )


def check_defaults(plan: CachePlan, given: Given, machine: Machine) -> None:
    """Refuse a plan that rests on a default that vLLM chooses by facts unknown here, or on blocks that vLLM refuses.

    Raises:
        InvalidError: such a default was taken, or such blocks; the message names the argument to give.
    """
    specs = [layer.spec for rank in plan.ranks for layer in rank.layers]
    if "block-size" not in given.values and any(spec.is_latent for spec in specs):
        raise _open(
            "block-size", "the attention backend chooses the block size of latent attention"
        )
    if machine.platform == "cpu" and any(_is_special(spec) for spec in specs):
        message = "vLLM chooses the blocks of recurrent and latent layers by the processor; plan them for a GPU"
        raise InvalidError(message, resource="platform", rule="argument_left_open")
    multiple = _BLOCK_MULTIPLE_TOKENS[machine.platform]
    tokens = given.count("block-size") or multiple
    least = round_up(tokens, multiple)
    if tokens != least:
        message = f"--block-size is {tokens}; vLLM's attention there needs a multiple of {multiple}, such as {least}"
        raise InvalidError(message, resource="block-size", rule="block_not_supported")
    counts_steps = any(isinstance(spec, SlidingWindow | ChunkedLocal) for spec in specs)
    if counts_steps and "max-num-batched-tokens" not in given.values and machine.platform != "cpu":
        raise _open(
            "max-num-batched-tokens",
            "windows keep the tokens of a step, and its default depends on the GPU",
        )


def _is_special(spec: LayerSpec) -> bool:
    return spec.is_latent or isinstance(spec, StateSpace)


# The model.


def _config(model: str, given: Given) -> dict[str, Any]:
    """Return the model's config with the element type that vLLM will compute in."""
    config = plan_inputs.read_object(plan_inputs.config_path(model))
    inner = config.get("text_config")
    written = given.values.get("dtype", "auto").lower()
    own = config.get("dtype") or config.get("torch_dtype")
    if isinstance(inner, dict):
        own = own or inner.get("dtype") or inner.get("torch_dtype")
    if written == "auto":
        if own is None:
            raise _open("dtype", "the model's config does not name one")
        # vLLM computes in float32 only if it is asked to.
        chosen = "bfloat16" if own == "float32" or _is_too_wide(config, own) else str(own)
    elif written in _DTYPES:
        chosen = _DTYPES[written]
        if _is_too_wide(config, chosen):
            model_type = config["model_type"]
            message = f"vLLM computes no {model_type} model in float16; give bfloat16 or leave --dtype out"
            raise InvalidError(message, resource="dtype")
    else:
        message = f"--dtype is {written[:40]!r}; write auto or one of {', '.join(_DTYPES)}"
        raise InvalidError(message, resource="dtype")
    dtypes = {"dtype": chosen, "torch_dtype": chosen}
    made = with_windows(with_state_dtype({**config, **dtypes}, chosen))
    if isinstance(inner, dict):
        made["text_config"] = with_windows(with_state_dtype({**inner, **dtypes}, chosen))
    return made


def _is_too_wide(config: Mapping[str, Any], dtype: Any) -> bool:
    """Tell whether a model's numbers have a wider range than its elements would have."""
    return dtype == "float16" and config.get("model_type") in _NEVER_IN_FLOAT16


def _kv_dtype(config: Mapping[str, Any], given: Given) -> str:
    written = given.values.get("kv-cache-dtype", "auto")
    if written != "auto":
        return written
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping) and any("kv_cache" in word for word in quantised):
        raise _open("kv-cache-dtype", "its default depends on how the checkpoint quantises K and V")
    return str(config["dtype"])


def _longest_request(
    model: str, config: Mapping[str, Any], given: Given, *, takes_any: bool
) -> int:
    """Return the tokens of the longest request: as given, else as many as the config and the tokenizer allow."""
    inner = config.get("text_config")
    words = {**config, **inner} if isinstance(inner, dict) else config
    reach = _reach_tokens(model, words)
    if "max-model-len" in given.values and not _is_auto(given):
        tokens = given.count("max-model-len") or 0
        if reach is not None and not takes_any:
            _check_reach(tokens, reach, words)
        return tokens
    if reach is None:
        raise _open(
            "max-model-len", "the config does not clearly say how many tokens the model supports"
        )
    return reach


def _reach_tokens(model: str, words: Mapping[str, Any]) -> int | None:
    """Return how many tokens vLLM finds that the model supports; None if the config does not say so plainly."""
    found = [words[name] for name in _POSITIONS if isinstance(words.get(name), int)]
    if not found or not _is_plain_rope(words):
        return None
    tokens = int(min(found))
    path = Path(model, "tokenizer_config.json")
    if path.is_file():
        most = plan_inputs.read_object(path).get("model_max_length")
        tokens = int(min(tokens, most)) if isinstance(most, int | float) else tokens
    return tokens


def _check_reach(tokens: int, reach_tokens: int, words: Mapping[str, Any]) -> None:
    """Refuse what vLLM refuses: more tokens than the model supports and than the config otherwise allows."""
    most = words.get("model_max_length")
    allowed = max(reach_tokens, most) if isinstance(most, int) else reach_tokens
    if tokens > allowed:
        message = (
            f"--max-model-len is {tokens}, but by its config and tokenizer the model supports {allowed}; use at most "
            f"that, or set {ANY_LENGTH_VARIABLE}=1, both for the engine and for this command"
        )
        raise InvalidError(message, resource="max-model-len", rule="beyond_the_model")


def _is_plain_rope(words: Mapping[str, Any]) -> bool:
    """Tell whether positions are as the config counts them, with nothing that stretches them further."""
    rope = words.get("rope_parameters") or words.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return True
    parts = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
    for part in parts:
        kind = part.get("rope_type", part.get("type", "default"))
        is_gemma = "gemma3" in str(words.get("model_type"))
        if kind not in ("default", *_ROPE_TYPES_COUNTED) and not is_gemma:
            return False
    return True


def _is_auto(given: Given) -> bool:
    return given.values.get("max-model-len", "").lower() in ("auto", "-1")


# The engine.


def _engine(
    config: Mapping[str, Any], given: Given, machine: Machine, longest_tokens: int
) -> EngineInputs:
    has_prefixes = given.switches.get("enable-prefix-caching", caches_prefixes(config))
    mode = given.values.get("mamba-cache-mode", "none")
    if mode == "none" and has_prefixes:
        # States of recurrent layers can be found again only at the ends of blocks.
        mode = "align"
    return EngineInputs(
        tokens_per_step=_tokens_per_step(given, machine, longest_tokens),
        steps_in_flight=_steps_in_flight(given, machine),
        state_mode=mode if has_prefixes else "none",
        prefix_caching=has_prefixes,
        has_connector="kv-transfer-config" in given.values or "kv-offloading-size" in given.values,
        match_tokens=given.count("prefix-match-unit"),
        one_group=_is_one_group(config, given, machine),
    )


def _is_one_group(config: Mapping[str, Any], given: Given, machine: Machine) -> bool:
    """Tell whether vLLM uses one table for all layers, which it does only if it is told to."""
    told = given.switches.get("disable-hybrid-kv-cache-manager")
    if told is not None:
        return told
    inner = config.get("text_config")
    words = {**config, **inner} if isinstance(inner, dict) else config
    if words.get("attention_chunk_size") and not machine.splits_chunks:
        return True
    if "kv-transfer-config" in given.values:
        transfer = given.config("kv-transfer-config")
        if not _serves_groups(transfer):
            name = str(transfer.get("kv_connector"))
            why = f"it is not known here whether the connector {name[:60]} can serve several groups of layers"
            raise _open("disable-hybrid-kv-cache-manager, or its --no- form,", why)
    return False


def _serves_groups(transfer: Any) -> bool:
    """Tell whether it is known that a connector, or each of those that it joins, serves several groups of layers."""
    if not isinstance(transfer, Mapping):
        return False
    name = transfer.get("kv_connector")
    if name != _JOINING:
        return name in _CONNECTORS_OF_GROUPS
    extra = transfer.get("kv_connector_extra_config")
    joined = extra.get("connectors") if isinstance(extra, Mapping) else None
    return isinstance(joined, list) and bool(joined) and all(map(_serves_groups, joined))


def _tokens_per_step(given: Given, machine: Machine, longest_tokens: int) -> int:
    tokens = given.count("max-num-batched-tokens")
    if tokens is not None:
        _check_step(tokens, given, longest_tokens)
        return tokens
    if (given.count("data-parallel-size") or 1) > 1:
        raise _open(
            "max-num-batched-tokens",
            "with several data parallel ranks, its default depends on the model",
        )
    on_cpu = machine.platform == "cpu"
    parallel = _parallel(given)
    ranks = parallel.tensor_ranks * parallel.pipeline_ranks if on_cpu else 1
    more = 2 if given.values.get("performance-mode") == "throughput" else 1
    tokens = _STEP_TOKENS[machine.platform] * ranks * more
    if not given.switches.get("enable-chunked-prefill", True):
        tokens = max(tokens, longest_tokens)
    requests = given.count("max-num-seqs") or _REQUESTS_MAX[machine.platform] * ranks * more
    return min(tokens, requests * longest_tokens)


def _check_step(tokens: int, given: Given, longest_tokens: int) -> None:
    """Refuse what vLLM refuses: steps without room for all requests, or for a whole prompt if prompts are not split."""
    least, why = given.count("max-num-seqs") or 0, "max-num-seqs"
    if not given.switches.get("enable-chunked-prefill", True) and longest_tokens > least:
        least, why = longest_tokens, "max-model-len"
    if tokens < least:
        message = (
            f"--max-num-batched-tokens is {tokens}, but --{why} is {least}, and a step must have room for that many "
            "tokens; raise the one or lower the other"
        )
        raise InvalidError(message, resource="max-num-batched-tokens", rule="step_too_small")


def _steps_in_flight(given: Given, machine: Machine) -> int:
    pipeline_ranks = given.count("pipeline-parallel-size") or 1
    is_async = given.switches.get("async-scheduling", True) and machine.platform != "cpu"
    return pipeline_ranks + int(is_async)


def _parallel(given: Given) -> ParallelInputs:
    return ParallelInputs(
        tensor_ranks=given.count("tensor-parallel-size") or 1,
        pipeline_ranks=given.count("pipeline-parallel-size") or 1,
        context_ranks=given.count("decode-context-parallel-size") or 1,
    )


# The memory.


def _device_bytes(given: Given, machine: Machine) -> int:
    """Return the bytes for the cache: as given, else what is left of the memory that vLLM may take.

    A number of blocks that is given makes vLLM ask for no memory at all.
    """
    if given.count("num-gpu-blocks-override"):
        return 0
    told = given.count("kv-cache-memory-bytes")
    if told is not None:
        return told
    if not machine.device_bytes or not machine.other_bytes:
        message = (
            "give --kv-cache-memory-bytes after --vllm; or give before it --device-memory, all memory of one device, "
            "and --other-memory, the memory of weights, activations and graphs, which an engine logs"
        )
        raise InvalidError(message, resource="device_bytes", rule="argument_left_open")
    written = given.values.get("gpu-memory-utilization", str(_UTILIZATION))
    try:
        share = float(written)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        message = f"--gpu-memory-utilization is {written[:40]!r}; write a number above 0, at most 1"
        raise InvalidError(message, resource="gpu-memory-utilization", rule="not_a_number")
    return max(0, math.ceil(machine.device_bytes * share) - machine.other_bytes)


def _open(name: str, why: str) -> InvalidError:
    message = f"give --{name} after --vllm: {why}"
    return InvalidError(message, resource=name, rule="argument_left_open")
