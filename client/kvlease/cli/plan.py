"""Own `kvlease plan`: print what a model's cache will be, before anything runs; the arithmetic is the daemon's own."""

import importlib
import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from kvlease.cli import plan_inputs, plan_tables
from kvlease.cli.planner import Planner, find_planner
from kvlease.cli.records import plain
from kvlease.errors import InvalidError, KVLeaseError
from kvlease.plan import EngineInputs, ParallelInputs, PlanInputs
from kvlease.plan_report import WhatIf
from kvlease.units import parse_bytes

_BYTES: Final = "Bytes, for example 8GiB, 500MB or 4096."
_INPUTS: Final = "What to plan for"
_MEMORY: Final = "Memory"
_ENGINE: Final = "How the engine runs"
_OUTPUT: Final = "What to print"


def plan_command(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="A config.json, the directory that has one, or a model in the local Hugging Face cache.",
            rich_help_panel=_INPUTS,
        ),
    ] = "",
    specs: Annotated[
        str, typer.Option(help="A JSON list of layers, instead.", rich_help_panel=_INPUTS)
    ] = "",
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="How K and V are kept, such as fp8; empty: the model's own.",
            rich_help_panel=_INPUTS,
        ),
    ] = "",
    layout: Annotated[
        str,
        typer.Option(
            help="Order of the axes in memory, such as LBHNC; empty: BLHNC.",
            rich_help_panel=_INPUTS,
        ),
    ] = "",
    tokens_per_block: Annotated[
        int, typer.Option(help="Tokens that one block covers.", rich_help_panel=_INPUTS)
    ] = 16,
    model_digest: Annotated[
        str, typer.Option(help="Digest or revision of the weights.", rich_help_panel=_INPUTS)
    ] = "",
    device_memory: Annotated[
        str,
        typer.Option(help=f"Device memory of each rank. {_BYTES}", rich_help_panel=_MEMORY),
    ] = "",
    device_blocks: Annotated[
        int, typer.Option(help="Device blocks, instead of memory.", rich_help_panel=_MEMORY)
    ] = 0,
    null_blocks: Annotated[
        int, typer.Option(help="Blocks that are never granted.", rich_help_panel=_MEMORY)
    ] = 0,
    host_memory: Annotated[
        str, typer.Option(help="Host memory of all ranks together.", rich_help_panel=_MEMORY)
    ] = "",
    disk: Annotated[str, typer.Option(help="Bytes of disk.", rich_help_panel=_MEMORY)] = "",
    remote: Annotated[
        str, typer.Option(help="Bytes of a remote store.", rich_help_panel=_MEMORY)
    ] = "",
    longest_request: Annotated[
        str,
        typer.Option(
            help="Tokens of the longest request; auto: as many as the model takes and the memory holds.",
            rich_help_panel=_ENGINE,
        ),
    ] = plan_inputs.AUTO,
    tokens_per_step: Annotated[
        int,
        typer.Option(
            help="Tokens that one scheduler step computes at most.", rich_help_panel=_ENGINE
        ),
    ] = 2048,
    state_mode: Annotated[
        str,
        typer.Option(
            help="Which recurrent states are kept: none but the current one, align, or all.",
            rich_help_panel=_ENGINE,
        ),
    ] = "none",
    tensor_ranks: Annotated[
        int, typer.Option(help="Ranks that share heads.", rich_help_panel=_ENGINE)
    ] = 1,
    pipeline_ranks: Annotated[
        int, typer.Option(help="Ranks that share layers.", rich_help_panel=_ENGINE)
    ] = 1,
    context_ranks: Annotated[
        int, typer.Option(help="Ranks that share tokens.", rich_help_panel=_ENGINE)
    ] = 1,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="A change to compare with, such as tokens_per_block=8; may be repeated; all: the usual ones.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="A .png or .svg to draw concurrency against request length into.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Show the blocks, bytes and requests of a model's cache, with the equations that give them."""
    try:
        planner = find_planner()
        source = plan_inputs.read_source(model, specs)
        inputs = PlanInputs(
            layers=source.layers,
            model_config=source.model_config,
            kv_dtype=kv_dtype,
            layout=layout,
            tokens_per_block=tokens_per_block,
            model_digest=model_digest,
            device_bytes=_bytes(device_memory),
            device_blocks=device_blocks,
            null_blocks=null_blocks,
            host_bytes=_bytes(host_memory),
            disk_bytes=_bytes(disk),
            remote_bytes=_bytes(remote),
            longest_request_tokens=plan_inputs.longest_request(longest_request),
            engine=EngineInputs(tokens_per_step=tokens_per_step, state_mode=state_mode),
            parallel=ParallelInputs(
                tensor_ranks=tensor_ranks,
                pipeline_ranks=pipeline_ranks,
                context_ranks=context_ranks,
            ),
        )
        _require_memory(inputs)
        _answer(planner, inputs, tuple(what_if or ()), plot=plot, as_json=as_json)
    except KVLeaseError as error:
        _refuse(error, as_json=as_json)
        raise typer.Exit(2) from error


def _answer(
    planner: Planner,
    inputs: PlanInputs,
    changes: tuple[str, ...],
    *,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print the plan, and draw it where that is asked for."""
    plan = planner.plan_or_explain(inputs)
    report = planner.report(inputs, plan)
    what_ifs = planner.what_ifs(inputs, changes)
    if as_json:
        answer = {"plan": plain(plan), "report": plain(report), "what_ifs": plain(what_ifs)}
        typer.echo(json.dumps(answer, indent=2))
    else:
        console = Console()
        for part in plan_tables.answer(plan, report, what_ifs, width=console.width):
            console.print(part)
    if plot is not None:
        _draw(planner, inputs, what_ifs, plot)


def _draw(planner: Planner, inputs: PlanInputs, what_ifs: tuple[WhatIf, ...], path: Path) -> None:
    try:
        drawing: Any = importlib.import_module("kvlease.cli.plan_plot")
    except ImportError as error:
        message = "--plot needs matplotlib; install it with: pip install 'kvlease[plot]'"
        raise InvalidError(message, resource="plot") from error
    possible = [change.change for change in what_ifs if not change.after.refusal]
    drawing.draw(planner, inputs, possible, path)


def _require_memory(inputs: PlanInputs) -> None:
    if not inputs.device_bytes and not inputs.device_blocks:
        message = "give --device-memory, such as 80GiB, or --device-blocks"
        raise InvalidError(message, resource="device_bytes")


def _bytes(written: str) -> int:
    return parse_bytes(written) if written else 0


def _refuse(error: KVLeaseError, *, as_json: bool) -> None:
    console = Console(stderr=True)
    if as_json:
        problem = {"code": error.code, "message": error.message}
        for name in ("rule", "resource", "need", "available", "limit", "remedies"):
            problem[name] = getattr(error, name)
        typer.echo(json.dumps(problem, indent=2), err=True)
        return
    for part in plan_tables.refusal(error):
        console.print(part)
