"""Draw docs/states.md from the tables of the core: `python docs/draw_states.py` writes it, `--check` compares it."""

import sys
from itertools import pairwise
from pathlib import Path

from kvleased.core import states
from kvleased.core.states import BLOCK_TRANSITIONS, SLOT_TRANSITIONS, Event, State, Transitions

PAGE = Path(__file__).with_name("states.md")


def meaning(kind: type[State] | type[Event], source: str) -> dict[str, str]:
    """Return what each member means, as its docstring in the source says."""
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
    """Return the transitions as a table: states down, events across, an empty cell where there is none."""
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


def page() -> str:
    """Return the whole page."""
    source = Path(states.__file__).read_text()
    prose = (states.__doc__ or "").split("\n\n", 1)[1].strip()
    state_rows = "\n".join(
        f"| **{name}** | {text} |" for name, text in meaning(State, source).items()
    )
    event_rows = "\n".join(
        f"| {name.lower()} | {text} |" for name, text in meaning(Event, source).items()
    )
    return f"""# States

This page is drawn from the tables in `service/kvleased/core/states.py` by `python docs/draw_states.py`; a test compares
the two. Nothing else in the code changes a state.

{prose}

| state | meaning |
|---|---|
{state_rows}

| event | meaning |
|---|---|
{event_rows}

## A device block

{diagram(BLOCK_TRANSITIONS)}

{table(BLOCK_TRANSITIONS)}

## A slot of the host pool

{diagram(SLOT_TRANSITIONS)}

{table(SLOT_TRANSITIONS)}

Every pair of state and event that is not in a table is our own mistake: it ends in an assertion and changes nothing.
"""


def main() -> int:
    """Write the page, or compare it with `--check`."""
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
