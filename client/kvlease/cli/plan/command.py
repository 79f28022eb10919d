"""Own `kvlease plan`: show what a model's cache will be before anything runs; the daemon's own planner computes it."""
# ruff: noqa: ARG001 -- typer reads a command's options from its signature, and keeps their values in the context

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console
from typer.core import TyperCommand

from kvlease.cli.drawing import drawing
from kvlease.cli.plan import inputs as plan_inputs
from kvlease.cli.plan import options, tables
from kvlease.cli.plan.planner import Planner, find_planner
from kvlease.cli.plan.settings import OWN, VLLM, Spelling
from kvlease.cli.plan.vllm.arguments import read_arguments
from kvlease.cli.plan.vllm.choices import (
    ANY_LENGTH_VARIABLE,
    PLATFORMS,
    SPLIT_CHUNKS_VARIABLE,
    Machine,
    check_defaults,
    inputs_of,
)
from kvlease.cli.plan.vllm.transfer import warnings
from kvlease.cli.records import plain
from kvlease.errors import InvalidError, KVLeaseError
from kvlease.plan import EngineInputs, ParallelInputs, PlanInputs
from kvlease.units import TOKENS_MAX, checked_count, parse_bytes

_VLLM: Final = "--vllm"
_FINEST: Final = "none"
"""The value of --match-tokens with which the groups decide."""

_OF_PLAN: Final = (
    *("kv_dtype", "layout", "tokens_per_block", "model_digest"),
    *("device_blocks", "null_blocks", "blocks_per_slot"),
)
_OF_ENGINE: Final = (
    *("tokens_per_step", "steps_in_flight", "lookahead_tokens"),
    *("state_mode", "prefix_caching", "one_group"),
)
_OF_RANKS: Final = ("tensor_ranks", "pipeline_ranks", "context_ranks")
"""Options with the same names as the fields that they set."""
_MEMORY: Final = {
    "device_bytes": "device_memory",
    "host_bytes": "host_memory",
    "disk_bytes": "disk",
    "remote_bytes": "remote",
}
"""The options for numbers of bytes, by the names of their fields."""


class PlanCommand(TyperCommand):
    """The command line of `kvlease plan`, which may end with vLLM's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments after --vllm apart, to be read by vLLM's rules."""
        if _VLLM in args:
            end = args.index(_VLLM) + 1
            ctx.meta[_VLLM] = args[end:]
            args = args[:end]
        return super().parse_args(ctx, args)


def plan_command(
    context: typer.Context,
    *,
    model: options.Model = "",
    specs: options.Specs = "",
    kv_dtype: options.KvDtype = "",
    layout: options.Layout = "",
    tokens_per_block: options.TokensPerBlock = 16,
    model_digest: options.ModelDigest = "",
    device_memory: options.DeviceMemory = "",
    device_blocks: options.DeviceBlocks = 0,
    null_blocks: options.NullBlocks = 0,
    host_memory: options.HostMemory = "",
    disk: options.Disk = "",
    remote: options.Remote = "",
    blocks_per_slot: options.BlocksPerSlot = 1,
    longest_request: options.LongestRequest = plan_inputs.AUTO,
    fit: options.Fit = False,
    tokens_per_step: options.TokensPerStep = 2048,
    steps_in_flight: options.StepsInFlight = 1,
    lookahead_tokens: options.LookaheadTokens = 0,
    encoder_tokens: options.EncoderTokens = 0,
    state_mode: options.StateMode = "none",
    prefix_caching: options.PrefixCaching = True,
    match_tokens: options.MatchTokens = _FINEST,
    one_group: options.OneGroup = False,
    tensor_ranks: options.TensorRanks = 1,
    pipeline_ranks: options.PipelineRanks = 1,
    context_ranks: options.ContextRanks = 1,
    what_if: options.Changes = None,
    plot: options.Plot = None,
    vllm: options.Vllm = False,
    platform: options.Platform = PLATFORMS[0],
    other_memory: options.OtherMemory = "",
    as_json: options.Json = False,
) -> None:
    """Show how many blocks, bytes and requests a model's cache has, with the equation behind each number."""
    changes = tuple(what_if or ())
    try:
        planner = find_planner()
        if vllm:
            _plan_as_vllm(planner, context, changes, plot, as_json=as_json)
        else:
            inputs = _inputs(context.params)
            _answer(planner, inputs, changes, plot=plot, as_json=as_json)
    except KVLeaseError as error:
        _refuse(error, VLLM if vllm else OWN, as_json=as_json)
        raise typer.Exit(2) from error


def _inputs(words: Mapping[str, Any]) -> PlanInputs:
    """Return the inputs of the plan that the options ask for.

    Raises:
        InvalidError: an option makes no sense, or a needed one is missing.
    """
    source = plan_inputs.read_source(words["model"], words["specs"])
    memory: dict[str, Any] = {name: _bytes(words[option]) for name, option in _MEMORY.items()}
    inputs = PlanInputs(
        layers=source.layers,
        model_config=source.model_config,
        longest_request_tokens=plan_inputs.longest_request(words["longest_request"]),
        fit_longest_request=words["fit"],
        engine=EngineInputs(
            encoder_tokens_max=words["encoder_tokens"],
            match_tokens=_match_tokens(words["match_tokens"]),
            **{name: words[name] for name in _OF_ENGINE},
        ),
        parallel=ParallelInputs(**{name: words[name] for name in _OF_RANKS}),
        **memory,
        **{name: words[name] for name in _OF_PLAN},
    )
    if not inputs.device_bytes and not inputs.device_blocks:
        message = "give --device-memory, such as 80GiB, or --device-blocks"
        raise InvalidError(message, resource="device_bytes")
    return inputs


def _plan_as_vllm(
    planner: Planner,
    context: typer.Context,
    changes: tuple[str, ...],
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print the plan that vLLM would compute; our own options may add lower tiers and the like."""
    words = context.params
    machine = Machine(
        platform=words["platform"],
        device_bytes=_bytes(words["device_memory"]),
        other_bytes=_bytes(words["other_memory"]),
        layout=words["layout"],
        takes_any_length=os.environ.get(ANY_LENGTH_VARIABLE, "").strip().lower() in ("1", "true"),
        splits_chunks=os.environ.get(SPLIT_CHUNKS_VARIABLE, "1").strip() != "0",
    )
    _refuse_what_vllm_says(context)
    given = read_arguments(context.meta[_VLLM], _own_options(context))
    inputs = replace(
        inputs_of(given, machine),
        model_digest=words["model_digest"],
        host_bytes=_bytes(words["host_memory"]),
        disk_bytes=_bytes(words["disk"]),
        remote_bytes=_bytes(words["remote"]),
        blocks_per_slot=words["blocks_per_slot"],
    )
    check_defaults(planner.plan_or_explain(inputs), given, machine)
    if given.ignored and not as_json:
        named = ", ".join(f"--{name}" for name in dict.fromkeys(given.ignored))
        Console().print(f"These arguments do not affect the plan: {named}", highlight=False)
    for told in warnings(given):
        Console(stderr=True).print(told, highlight=False, markup=False)
    _answer(planner, inputs, changes, plot=plot, as_json=as_json, spelling=VLLM)


_BESIDE_VLLM: Final = frozenset(
    (
        *("vllm", "platform", "other_memory", "device_memory", "layout", "model_digest"),
        *("host_memory", "disk", "remote", "blocks_per_slot", "what_if", "plot", "as_json"),
    )
)
"""Our options that can be used with --vllm; vLLM's arguments replace all others."""


def _own_options(context: typer.Context) -> set[str]:
    """Return the options that may stand before --vllm, as they are written."""
    params = [one for one in context.command.params if one.name in _BESIDE_VLLM]
    return {word for one in params for word in one.opts} - {_VLLM}


def _refuse_what_vllm_says(context: typer.Context) -> None:
    for name in context.params:
        source = context.get_parameter_source(name)
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and name not in _BESIDE_VLLM:
            message = f"--{name.replace('_', '-')} cannot be used with --vllm; use vLLM's own arguments, after --vllm"
            raise InvalidError(message, resource=name, rule="said_by_vllm")


def _answer(
    planner: Planner,
    inputs: PlanInputs,
    changes: tuple[str, ...],
    *,
    plot: Path | None,
    as_json: bool,
    spelling: Spelling = OWN,
) -> None:
    """Print the plan, and draw it if that is asked for."""
    plotting = None if plot is None else drawing("kvlease.cli.plan.plot", plot)
    plan = planner.plan_or_explain(inputs)
    report = planner.report(inputs, plan)
    what_ifs = planner.what_ifs(inputs, changes)
    if as_json:
        derived = {"usable_blocks": plan.usable_blocks, "concurrency": plan.concurrency}
        said = plain(plan) | derived
        answer = {"plan": said, "report": plain(report), "what_ifs": plain(what_ifs)}
        typer.echo(json.dumps(answer, indent=2))
    else:
        console = Console()
        parts = tables.answer(plan, report, what_ifs, width=console.width, spelling=spelling)
        for part in parts:
            console.print(part)
    if plotting is not None:
        possible = [change.change for change in what_ifs if not change.after.refusal]
        plotting.draw(planner, inputs, possible, plot)


def _match_tokens(written: str) -> int | None:
    if written == _FINEST:
        return None
    if not plan_inputs.is_number(written):
        message = f"--match-tokens is {written[:40]!r}; write a number of tokens, or {_FINEST}"
        raise InvalidError(message, resource="match_tokens")
    return checked_count("match_tokens", int(written), least=1, most=TOKENS_MAX)


def _bytes(written: str) -> int:
    return parse_bytes(written) if written else 0


def _refuse(error: KVLeaseError, spelling: Spelling, *, as_json: bool) -> None:
    console = Console(stderr=True)
    if as_json:
        problem = {"code": error.code, "message": error.message}
        for name in ("rule", "resource", "need", "available", "limit", "remedies"):
            problem[name] = getattr(error, name)
        typer.echo(json.dumps(problem, indent=2), err=True)
        return
    for part in tables.refusal(error, spelling):
        console.print(part)
