"""The law of refusals in the sources: whoever is refused as INVALID is told which of its fields is wrong."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _without_resource(path: Path) -> Iterator[int]:
    """Yield the lines of a module on which an InvalidError is made that names no resource."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "InvalidError":
            continue
        # A keyword without a name stands for `**others`.
        if not {keyword.arg for keyword in node.keywords} & {"resource", None}:
            yield node.lineno


def test_every_invalid_error_names_a_resource() -> None:
    """No refusal as INVALID leaves it to its text alone what is wrong."""
    modules = [*(ROOT / "client").rglob("*.py"), *(ROOT / "service").rglob("*.py")]

    found = [f"{path}:{line}" for path in modules for line in _without_resource(path)]

    assert len(modules) > 300
    assert found == []
