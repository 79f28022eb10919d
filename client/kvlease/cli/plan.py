"""Own `kvlease plan`: print what a model's cache will be, before anything runs; the arithmetic is the daemon's own."""

import dataclasses
import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from kvlease.errors import InvalidError, KVLeaseError
from kvlease.plan import CachePlan, PlanInputs
from kvlease.units import parse_bytes, show_bytes

MEMORY_HELP = "Bytes, for example 8GiB, 500MB or 4096."


def plan_command(
    model: Annotated[Path, typer.Option(help="A config.json, or the directory that has one.")],
    *,
    device_memory: Annotated[str, typer.Option(help=f"Device memory to fill. {MEMORY_HELP}")] = "",
    device_blocks: Annotated[int, typer.Option(help="Device blocks, instead of memory.")] = 0,
    host_memory: Annotated[str, typer.Option(help=f"Host memory to fill. {MEMORY_HELP}")] = "",
    tokens_per_block: Annotated[int, typer.Option(help="Tokens that one block covers.")] = 16,
    longest_request: Annotated[int, typer.Option(help="Tokens; 0 is as many as fit.")] = 0,
    kv_dtype: Annotated[str, typer.Option(help="Element type; empty is the model's own.")] = "",
    model_digest: Annotated[str, typer.Option(help="Digest or revision of the weights.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Print the blocks, bytes and longest request of a model's cache, with the equations that give them."""
    try:
        inputs = PlanInputs(
            model_config=_config_text(model),
            kv_dtype=kv_dtype,
            tokens_per_block=tokens_per_block,
            device_bytes=parse_bytes(device_memory) if device_memory else 0,
            device_blocks=device_blocks,
            host_bytes=parse_bytes(host_memory) if host_memory else 0,
            longest_request_tokens=longest_request,
            model_digest=model_digest,
        )
        plan = _planner()(inputs)
    except KVLeaseError as error:
        Console(stderr=True).print(f"{error.code}: {error.message}", style="red", markup=False)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(plan), indent=2))
    else:
        _print(Console(), inputs, plan)


def equations(inputs: PlanInputs, plan: CachePlan) -> list[tuple[str, str, str]]:
    """Return each number of a plan as its name, the equation with the numbers in it, and how people read it."""
    per_block, tokens = plan.bytes_per_block, plan.tokens_per_block
    pages = sum(layer.bytes_per_page for layer in plan.layers)
    blocks_from = (
        f"floor({inputs.device_bytes} / {per_block})" if inputs.device_bytes else "as given"
    )
    if inputs.longest_request_tokens:
        longest_from = f"ceil({inputs.longest_request_tokens} / {tokens}) * {tokens}"
    else:
        longest_from = f"{plan.blocks_per_longest_request} blocks * {tokens}"
    rows = [
        ("bytes_per_token", _bytes_per_token_equation(plan), show_bytes(plan.bytes_per_token)),
        (
            "bytes_per_block",
            f"round_up({pages} of {len(plan.layers)} pages, 64) = {per_block}",
            show_bytes(per_block),
        ),
        ("num_blocks", f"{blocks_from} = {plan.num_blocks}", f"{plan.num_blocks:,} blocks"),
        (
            "device_bytes",
            f"{plan.num_blocks} * {per_block} = {plan.device_bytes}",
            show_bytes(plan.device_bytes),
        ),
        (
            "capacity_tokens",
            f"{plan.num_blocks} * {tokens} = {plan.capacity_tokens}",
            f"{plan.capacity_tokens:,} tokens",
        ),
        (
            "longest_request_tokens",
            f"{longest_from} = {plan.longest_request_tokens}",
            f"{plan.longest_request_tokens:,} tokens",
        ),
    ]
    if plan.num_slots:
        slots = f"floor({inputs.host_bytes} / {per_block}) = {plan.num_slots}"
        rows.append(("num_slots", slots, f"{plan.num_slots:,} slots"))
        host = f"{plan.num_slots} * {per_block} = {plan.host_bytes}"
        rows.append(("host_bytes", host, show_bytes(plan.host_bytes)))
    return rows


def _bytes_per_token_equation(plan: CachePlan) -> str:
    """Write the sum over layers, one product for each run of equal layers."""
    counts: dict[tuple[int, int, int, int], int] = {}
    for layer in plan.layers:
        spec = layer.spec
        shape = (spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.bytes_per_element)
        counts[shape] = counts.get(shape, 0) + 1
    products = [
        f"{count} layers * {heads} heads * ({k} + {v}) * {element} B"
        for (heads, k, v, element), count in counts.items()
    ]
    return f"{' + '.join(products)} = {plan.bytes_per_token}"


def _print(console: Console, inputs: PlanInputs, plan: CachePlan) -> None:
    table = Table(title="Plan", title_justify="left", caption_justify="left")
    table.caption = f"layout {plan.layout_fingerprint}"
    table.add_column("number", no_wrap=True)
    table.add_column("equation", overflow="fold")
    table.add_column("is", justify="right", no_wrap=True)
    for row in equations(inputs, plan):
        table.add_row(*row)
    console.print(table)


def _config_text(model: Path) -> str:
    path = model / "config.json" if model.is_dir() else model
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidError(f"cannot read {path}: {error}", resource="model") from error


def _planner() -> Callable[[PlanInputs], CachePlan]:
    """Return the daemon's own planner: found by name, because the client imports nothing of the service."""
    (planner,) = entry_points(group="kvlease.planner", name="plan")
    return cast("Callable[[PlanInputs], CachePlan]", planner.load())
