"""Laws of docs/reliability.md: what it says is what the code does."""

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_PAGE = (_ROOT / "docs" / "reliability.md").read_text()
_NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", _PAGE)))
_LAWS = [f"I{number}" for number in range(1, 25)] + [f"L{number}" for number in range(1, 11)]


@pytest.mark.parametrize(("path", "name"), _NAMED)
def test_named_check_is_there(path: str, name: str) -> None:
    """Each function that docs/reliability.md names is defined in the file that it names."""
    nodes = ast.walk(ast.parse((_ROOT / path).read_text()))

    functions = {
        node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name in functions


@pytest.mark.parametrize("law", _LAWS)
def test_law_names_its_checks(law: str) -> None:
    """Each law has a row of its own in docs/reliability.md that names at least one check."""
    (row,) = re.findall(rf"^\| {law} \|.*$", _PAGE, re.MULTILINE)

    assert "::" in row
