"""Draw docs/states.md from the tables of the core: `python docs/draw_states.py` writes it, `--check` compares it."""

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from kvleased.core.blocks import states
from kvleased.core.blocks.states import (
    BLOCK_TRANSITIONS,
    SLOT_TRANSITIONS,
    Event,
    State,
    Transitions,
)
from kvleased.core.lease import phases
from kvleased.core.lease.phases import AFTER_RESTART, PHASE_TRANSITIONS, Phase

PAGE = Path(__file__).with_name("states.md")


def meaning(kind: type[State] | type[Event] | type[Phase], source: str) -> dict[str, str]:
    """Return each member's meaning: its docstring in the source."""
    lines = source[source.index(f"class {kind.__name__}(") :].splitlines()
    found: dict[str, str] = {}
    for line, after in pairwise(lines):
        name = line.strip().split(" = ")[0]
        if name in kind.__members__ and after.strip().startswith('"""'):
            found[name] = after.strip().strip('"')
    return found


def diagram(transitions: Transitions) -> str:
    """Return the transitions as a Mermaid state diagram."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> FREE"]
    for before, events in transitions.items():
        lines += [
            f"    {before.name} --> {after.name}: {event.name.lower()}"
            for event, after in events.items()
        ]
    return "\n".join([*lines, "```"])


def table(transitions: Transitions) -> str:
    """Return the transitions as a table: states down, events across, empty cells for no transition."""
    events = [event for event in Event if any(event in row for row in transitions.values())]
    head = "| from | " + " | ".join(event.name.lower() for event in events) + " |"
    rule = "|---" * (len(events) + 1) + "|"
    rows = [
        f"| **{state.name}** | "
        + " | ".join(getattr(row.get(event), "name", "") for event in events)
        + " |"
        for state, row in transitions.items()
        if row
    ]
    return "\n".join([head, rule, *rows])


def phase_diagram() -> str:
    """Return the life of a lease as a Mermaid state diagram."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for before, afters in PHASE_TRANSITIONS.items():
        lines += [
            f"    {_place(before)} --> {_place(after)}: {reason}"
            for after, reason in afters.items()
        ]
    return "\n".join([*lines, "```"])


def _place(phase: Phase) -> str:
    return "[*]" if phase is Phase.UNUSED else phase.name


def phase_table() -> str:
    """Return the life of a lease as a table: phases down, next phases across, and in the cells what leads there."""
    head = "| from | " + " | ".join(f"to {phase.name}" for phase in Phase) + " | after a restart |"
    rows = [
        f"| **{before.name}** | "
        + " | ".join(afters.get(after, "") for after in Phase)
        + f" | {AFTER_RESTART.get(before, Phase.UNUSED).name} |"
        for before, afters in PHASE_TRANSITIONS.items()
    ]
    return "\n".join([head, "|---" * (len(Phase) + 2) + "|", *rows])


def prose(text: str | None) -> str:
    """Return a module's docstring after its first sentence."""
    return (text or "").split("\n\n", 1)[1].strip()


def meanings(kind: type[State] | type[Event] | type[Phase], module: ModuleType) -> str:
    """Return the rows of a table of each member's meaning."""
    found = meaning(kind, Path(str(module.__file__)).read_text())
    return "\n".join(f"| **{name}** | {text} |" for name, text in found.items())


def page() -> str:
    """Return the whole page."""
    return f"""# States

This page is drawn by `python docs/draw_states.py` from the tables in `service/kvleased/core/blocks/states.py` and
`service/kvleased/core/lease/phases.py`; a test compares the two. Only `core/recovery.py` changes a state in another
way: what it does not believe after a restart, it makes free.

{prose(states.__doc__)}

| state | meaning |
|---|---|
{meanings(State, states)}

| event | meaning |
|---|---|
{meanings(Event, states)}

## A device block

{diagram(BLOCK_TRANSITIONS)}

{table(BLOCK_TRANSITIONS)}

## A slot of the host pool

{diagram(SLOT_TRANSITIONS)}

{table(SLOT_TRANSITIONS)}

Every pair of state and event that is not in a table is our own mistake: it ends in an assertion and changes nothing.

## A lease

{prose(phases.__doc__)}

| phase | meaning |
|---|---|
{meanings(Phase, phases)}

{phase_diagram()}

{phase_table()}

A phase that does not follow in the table is our own mistake, too, and ends in an assertion.
"""


def main() -> int:
    """Write the page, or compare it with `--check`."""
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
