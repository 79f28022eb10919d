"""Laws of the page about security: its table of roles is the code's, and its files and settings exist."""

import re
from pathlib import Path
from typing import Final

from kvleased.access.roles import OF_PATH, Role, Roles, of_verb
from kvleased.api.rest.routes import ROUTES
from kvleased.config.settings import Settings

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- roles: begin -->\n", "<!-- roles: end -->\n"


def written() -> str:
    """Return the page's table of who may call what."""
    lines = [
        "| what | " + " | ".join(role.value for role in Role) + " |",
        "|---" * (len(Role) + 1) + "|",
    ]
    seen: dict[str, Roles] = {}
    for route in ROUTES:
        name = (
            f"`{route.verb}`"
            if route.roles == of_verb(route.verb)
            else f"`{route.method} {route.path}`"
        )
        seen[name] = route.roles
    seen |= {f"`{path}`": roles for path, roles in OF_PATH.items()}
    for name, roles in sorted(seen.items(), key=lambda one: (one[0].startswith("`/"), one[0])):
        lines.append(
            f"| {name} | " + " | ".join("yes" if role in roles else "" for role in Role) + " |"
        )
    return "\n".join(lines) + "\n"


def test_roles_are_those_of_the_code() -> None:
    """The page's table is the one that the code uses."""
    _, _, rest = PAGE.read_text().partition(BEGIN)

    assert rest.partition(END)[0] == written()


def test_named_tests_are_there() -> None:
    """Every promise names a test that exists."""
    named = re.findall(r"`(tests/[\w/.]+)`", PAGE.read_text())

    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_limits_are_settings() -> None:
    """Every setting in the table of limits exists, with the number that the page gives."""
    table = PAGE.read_text().partition("| what | limit | setting |")[2].partition("\n\n")[0]
    names = re.findall(r"`(\w+)`", table)

    assert len(names) > 10
    assert set(names) <= set(Settings.model_fields)
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", cells[-1]):
            default = Settings.model_fields[name].default
            told = [int(one.replace(",", "")) for one in re.findall(r"\d[\d,]*", cells[1])]
            assert default in told or default == 1 << 20, name


if __name__ == "__main__":
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + written() + END + rest.partition(END)[2])
