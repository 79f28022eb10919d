"""Own the options of `kvlease plan`: their names and their help."""

from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

_BYTES: Final = "Bytes, for example 8GiB, 500MB or 4096."
_INPUTS: Final = "What to plan for"
_MEMORY: Final = "Memory"
_ENGINE: Final = "How the engine runs"
_OUTPUT: Final = "What to print"
_VLLM: Final = "What vLLM would plan"


def _of(panel: str, text: str, *names: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=text, rich_help_panel=panel)
    return option


Model: TypeAlias = Annotated[
    str,
    _of(
        _INPUTS,
        "A config.json, a directory with one, or the name of a model in the local Hugging Face cache.",
    ),
]
Specs: TypeAlias = Annotated[
    str,
    _of(_INPUTS, "A file with a JSON list of layers, in place of --model."),
]
KvDtype: TypeAlias = Annotated[
    str,
    _of(_INPUTS, "How K and V are stored, such as fp8; empty: the model's own."),
]
Layout: TypeAlias = Annotated[
    str,
    _of(_INPUTS, "Order of the axes in memory, such as LBHNC; empty: BLHNC."),
]
TokensPerBlock: TypeAlias = Annotated[
    int,
    _of(_INPUTS, "Tokens that one block covers."),
]
ModelDigest: TypeAlias = Annotated[
    str,
    _of(_INPUTS, "Digest or revision of the weights."),
]
DeviceMemory: TypeAlias = Annotated[
    str,
    _of(_MEMORY, f"Device memory of each rank. {_BYTES}"),
]
DeviceBlocks: TypeAlias = Annotated[
    int,
    _of(
        _MEMORY,
        "Number of device blocks, in place of --device-memory; if both are given, the blocks must fit.",
    ),
]
NullBlocks: TypeAlias = Annotated[
    int,
    _of(_MEMORY, "Blocks at the start of the pool that are never granted."),
]
HostMemory: TypeAlias = Annotated[
    str,
    _of(_MEMORY, "Bytes of host memory, for all ranks together."),
]
Disk: TypeAlias = Annotated[
    str,
    _of(_MEMORY, "Bytes of the disk store."),
]
Remote: TypeAlias = Annotated[
    str,
    _of(_MEMORY, "Bytes of the remote store."),
]
BlocksPerSlot: TypeAlias = Annotated[
    int,
    _of(_MEMORY, "Blocks that one slot of a lower tier holds."),
]
LongestRequest: TypeAlias = Annotated[
    str,
    _of(
        _ENGINE,
        "Tokens of the longest request; auto or 0: as many as the model takes and the memory holds.",
    ),
]
Fit: TypeAlias = Annotated[
    bool,
    _of(
        _ENGINE,
        "Shorten a longest request that does not fit instead of refusing it.",
        "--fit/--no-fit",
    ),
]
TokensPerStep: TypeAlias = Annotated[
    int,
    _of(_ENGINE, "Most tokens that one scheduler step computes."),
]
StepsInFlight: TypeAlias = Annotated[
    int,
    _of(_ENGINE, "Steps that may be writing at the same time."),
]
LookaheadTokens: TypeAlias = Annotated[
    int,
    _of(_ENGINE, "Tokens that speculative decoding prefills ahead."),
]
EncoderTokens: TypeAlias = Annotated[
    int,
    _of(_ENGINE, "Tokens of the longest encoder input; 0: as many as the model takes."),
]
StateMode: TypeAlias = Annotated[
    str,
    _of(_ENGINE, "Which recurrent states are kept: none (only the current one), align or all."),
]
PrefixCaching: TypeAlias = Annotated[
    bool,
    _of(_ENGINE, "Share prefixes between requests.", "--prefix-caching/--no-prefix-caching"),
]
MatchTokens: TypeAlias = Annotated[
    str,
    _of(
        _ENGINE,
        "Distance in tokens between places where a prefix can end; none: the finest that all groups allow.",
    ),
]
OneGroup: TypeAlias = Annotated[
    bool,
    _of(
        _ENGINE,
        "Use one table for all layers; windows then keep every token.",
        "--one-group/--no-one-group",
    ),
]
TensorRanks: TypeAlias = Annotated[
    int,
    _of(_ENGINE, "Ranks that share the heads of every layer."),
]
PipelineRanks: TypeAlias = Annotated[
    int,
    _of(_ENGINE, "Ranks that share the layers."),
]
ContextRanks: TypeAlias = Annotated[
    int,
    _of(_ENGINE, "Ranks that share the tokens of a request."),
]
Changes: TypeAlias = Annotated[
    list[str] | None,
    _of(
        _OUTPUT,
        "A change to compare, such as tokens_per_block=8; all: the usual changes. May be repeated.",
    ),
]
Plot: TypeAlias = Annotated[
    Path | None,
    _of(_OUTPUT, "A .png or .svg file in which to draw concurrency against request length."),
]
Vllm: TypeAlias = Annotated[
    bool,
    _of(
        _VLLM,
        "Everything after this is an argument of `vllm serve` 0.32; shows the plan that vLLM would make.",
        "--vllm",
    ),
]
Platform: TypeAlias = Annotated[
    str,
    _of(_VLLM, "Where vLLM will run: cuda or cpu."),
]
OtherMemory: TypeAlias = Annotated[
    str,
    _of(
        _VLLM,
        f"Part of --device-memory that weights, activations and graphs take, for --gpu-memory-utilization. {_BYTES}",
    ),
]
Json: TypeAlias = Annotated[
    bool,
    _of(_OUTPUT, "Print JSON instead of tables.", "--json"),
]
