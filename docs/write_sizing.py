"""Write the output of `kvlease plan` into docs/sizing.md: `python docs/write_sizing.py`; `--check` compares it.

The page has the commands, each in a console block behind `$ kvlease plan`; below each is its output today, up to the
equations.
"""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Final

from typer.testing import CliRunner

PAGE: Final = Path(__file__).with_name("sizing.md")
_BLOCK: Final = re.compile(r"```console\n\$ kvlease (plan [^\n]*)\n.*?```", re.DOTALL)
_EQUATIONS: Final = "\nWhere the numbers come from\n"
_COLUMNS: Final = "110"


def printed(arguments: str) -> str:
    """Return what a command prints, up to the equations."""
    os.environ |= {"COLUMNS": _COLUMNS, "NO_COLOR": "1", "TERM": "dumb"}
    # Imported here, because the console takes its width when it is made.
    from kvlease.cli.app import app  # noqa: PLC0415

    done = CliRunner().invoke(app, shlex.split(arguments))
    assert done.exit_code == 0, done.output
    head, _, _ = done.stdout.partition(_EQUATIONS)
    return "\n".join(line.rstrip() for line in head.rstrip().splitlines())


def page(now: str) -> str:
    """Return the page with its commands' output of today."""

    def block(found: re.Match[str]) -> str:
        return f"```console\n$ kvlease {found[1]}\n{printed(found[1])}\n```"

    return _BLOCK.sub(block, now)


def main() -> int:
    """Write the page, or with --check tell whether it is up to date."""
    os.chdir(PAGE.parents[1])
    now = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        return int(page(now) != now)
    PAGE.write_text(page(now))
    return 0


if __name__ == "__main__":
    sys.exit(main())
