"""Own the options of `kvlease plan`: how each is called and what its help says."""

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
        "A config.json, the directory that has one, or a model in the local Hugging Face cache.",
    ),
]
Specs: TypeAlias = Annotated[
    str,
    _of(_INPUTS, "A JSON list of layers, instead."),
]
KvDtype: TypeAlias = Annotated[
    str,
    _of(_INPUTS, "How K and V are kept, such as fp8; empty: the model's own."),
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
    _of(_MEMORY, "Device blocks, instead of memory; with memory, they must fit in it."),
]
NullBlocks: TypeAlias = Annotated[
    int,
    _of(_MEMORY, "Blocks that are never granted."),
]
HostMemory: TypeAlias = Annotated[
    str,
    _of(_MEMORY, "Host memory of all ranks together."),
]
Disk: TypeAlias = Annotated[
    str,
    _of(_MEMORY, "Bytes of disk."),
]
Remote: TypeAlias = Annotated[
    str,
    _of(_MEMORY, "Bytes of a remote store."),
]
BlocksPerSlot: TypeAlias = Annotated[
    int,
    _of(_MEMORY, "Blocks that one slot of a lower tier holds."),
]
LongestRequest: TypeAlias = Annotated[
    str,
    _of(
        _ENGINE,
        "Tokens of the longest request; auto, or 0: as many as the model takes and the memory holds.",
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
    _of(_ENGINE, "Tokens that one scheduler step computes at most."),
]
StepsInFlight: TypeAlias = Annotated[
    int,
    _of(_ENGINE, "Steps whose writes may be under way at once."),
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
    _of(_ENGINE, "Which recurrent states are kept: none but the current one, align, or all."),
]
PrefixCaching: TypeAlias = Annotated[
    bool,
    _of(_ENGINE, "Share prefixes between requests.", "--prefix-caching/--no-prefix-caching"),
]
MatchTokens: TypeAlias = Annotated[
    str,
    _of(
        _ENGINE,
        "Tokens between the ends of prefixes that can be found; none: the finest that all groups allow.",
    ),
]
OneGroup: TypeAlias = Annotated[
    bool,
    _of(
        _ENGINE,
        "Have one table for all layers; windows then keep every token.",
        "--one-group/--no-one-group",
    ),
]
TensorRanks: TypeAlias = Annotated[
    int,
    _of(_ENGINE, "Ranks that share heads."),
]
PipelineRanks: TypeAlias = Annotated[
    int,
    _of(_ENGINE, "Ranks that share layers."),
]
ContextRanks: TypeAlias = Annotated[
    int,
    _of(_ENGINE, "Ranks that share tokens."),
]
Changes: TypeAlias = Annotated[
    list[str] | None,
    _of(
        _OUTPUT,
        "A change to compare with, such as tokens_per_block=8; may be repeated; all: the usual ones.",
    ),
]
Plot: TypeAlias = Annotated[
    Path | None,
    _of(_OUTPUT, "A .png or .svg to draw concurrency against request length into."),
]
Vllm: TypeAlias = Annotated[
    bool,
    _of(
        _VLLM,
        "Everything behind this are arguments of `vllm serve` 0.32; the plan is what vLLM makes of them.",
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
        f"What weights, activations and graphs take of --device-memory, for --gpu-memory-utilization. {_BYTES}",
    ),
]
Json: TypeAlias = Annotated[
    bool,
    _of(_OUTPUT, "Print JSON.", "--json"),
]
