"""Own what the demo counts and what has to hold at its end, and show both; how any of it comes about is in `scenes`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from workload import Request


@dataclass(slots=True, kw_only=True)
class Tally:
    """All figures of the table, and the checks that failed."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    """The tokens that followed each prompt, by request id."""
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    recomputes: int = 0
    blocks_evicted: int = 0
    blocks_reloaded: int = 0
    faults: list[str] = field(default_factory=list)
    mismatches: int = 0
    failed_checks: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens generated in all."""
        return sum(map(len, self.answers.values()))

    @property
    def is_prompt_accounted_for(self) -> bool:
        """Whether each prompt token was hit, reloaded or computed, and none of them twice."""
        num_told = self.device_hit_tokens + self.host_hit_tokens + self.computed_tokens
        return num_told == self.prompt_tokens

    def take(self, request: Request, done: dict[str, Any]) -> None:
        """Count a finished request."""
        self.answers[request.request_id] = done["tokens"]
        self.prompt_tokens += len(request.token_ids)
        self.device_hit_tokens += done["device_hit_tokens"]
        self.host_hit_tokens += done["host_hit_tokens"]
        self.computed_tokens += done["computed_tokens"]
        self.recomputed_tokens += done["recomputed_tokens"]
        self.recomputes += done["recomputes"]

    def compare(self, reference: dict[str, list[int]]) -> None:
        """Count the tokens that differ from plain Transformers; a request without an answer differs in all of them."""
        for request_id, tokens in reference.items():
            answer = self.answers.get(request_id, [])
            self.mismatches += abs(len(tokens) - len(answer))
            self.mismatches += sum(
                ours != theirs for ours, theirs in zip(answer, tokens, strict=False)
            )

    def table(self) -> Table:
        """Return the figures as people read them."""
        rows = {
            "requests": f"{len(self.answers)}",
            "tokens generated": f"{self.num_tokens:,}",
            "prompt tokens": f"{self.prompt_tokens:,}",
            "  hit on device": f"{self.device_hit_tokens:,}",
            "  reloaded from host": f"{self.host_hit_tokens:,}",
            "  computed": f"{self.computed_tokens:,}",
            "computed again after a fault": f"{self.recomputed_tokens:,}",
            "blocks evicted": f"{self.blocks_evicted:,}",
            "blocks reloaded": f"{self.blocks_reloaded:,}",
            "faults injected": ", ".join(self.faults) or "none",
            "sequences recomputed": f"{self.recomputes}",
            "mismatches": f"{self.mismatches}",
        }
        table = Table("figure", "value", title="kvlease demo", title_justify="left")
        for name, value in rows.items():
            table.add_row(name, value)
        return table


class Stage:
    """Where the demo shows what it does: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, tally: Tally, num_requests: int) -> None:
        """Draw nothing yet."""
        self.tally = tally
        self.console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests, {task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._bar = self._progress.add_task("starting", total=num_requests, tokens=0)
        self._num_steps = 0

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        self._progress.stop()

    def begin(self, scene: str) -> None:
        """Name what comes next."""
        self._progress.update(self._bar, description=scene)
        if not self.console.is_terminal:
            self.console.print(f"… {scene}", soft_wrap=True)

    def stepped(self) -> None:
        """Count one token, at the time it is made."""
        self._num_steps += 1
        self._progress.update(self._bar, tokens=self._num_steps)

    def took(self, request: Request, done: dict[str, Any]) -> None:
        """Count a finished request."""
        self.tally.take(request, done)
        self._progress.update(self._bar, completed=len(self.tally.answers))

    def check(self, holds: bool, text: str) -> None:
        """Show what held or did not, and remember what did not."""
        line = f"[green]✓[/] {text}" if holds else f"[red]✗ {text}[/]"
        self.console.print(line, soft_wrap=True)
        if not holds:
            self.tally.failed_checks.append(text)
