"""Write the tables of docs/limits.md from the code: `python docs/write_limits.py`; `--check` compares them."""

import ast
import operator
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvleased.config.settings import Settings
from kvleased.config.tenant_settings import TenantSettings

PAGE: Final = Path(__file__).with_name("limits.md")
ROOT: Final = PAGE.parents[1]
_BOUNDING: Final = re.compile(
    r"^max_|_max$|_seconds$|_seconds_|_ms$|_ms_|_bytes|^drain|^retry|^tenants$"
)
"""Names of settings that bound something."""
_OPERATORS: Final = {
    ast.LShift: operator.lshift,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
}


def settings() -> list[str]:
    """Return a row for each setting that bounds something."""
    rows = ["| setting | default | may be | bounds |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        if _BOUNDING.search(name):
            default = "" if name == "tenants" else _told(field.default)
            rows.append(f"| `{name}` | {default} | {_range(field)} | {field.description} |")
    return rows


def tenants() -> list[str]:
    """Return a row for each limit of a tenant."""
    rows = ["| limit | default | may be | bounds |", "|---|---|---|---|"]
    docs = _docs_of(ROOT / "service/kvleased/config/tenant_settings.py", "TenantSettings")
    for name, field in TenantSettings.model_fields.items():
        rows.append(f"| `{name}` | {_told(field.default)} | {_range(field)} | {docs[name]} |")
    return rows


def fixed() -> list[str]:
    """Return a row for each limit that is no setting."""
    rows = ["| where | limit | value | what it bounds |", "|---|---|---|---|"]
    both = ROOT / "client/kvlease/ids.py"
    for path in (both, *sorted((ROOT / "service/kvleased").rglob("*.py"))):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])
        rows += [
            f"| `{module}` | `{name}` | {_told(value)} | {doc} |"
            for name, value, doc in _constants(path)
        ]
    return rows


def _range(field: Any) -> str:
    bounds = {type(one).__name__: one for one in field.metadata}
    least = getattr(bounds.get("Ge"), "ge", getattr(bounds.get("Gt"), "gt", None))
    most = getattr(bounds.get("Le"), "le", None)
    if least is None and most is None:
        return ""
    above = "above " if "Ge" not in bounds else ""
    return f"{above}{_told(least)} to {_told(most)}"


def _told(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value or "")


def _constants(path: Path) -> Iterator[tuple[str, Any, str]]:
    """Yield the public numbers of a module whose names end in MAX."""
    body = ast.parse(path.read_text()).body
    for at, node in enumerate(body):
        if not (
            isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
        ):
            continue
        name = node.target.id
        if name.startswith("_") or not name.endswith("_MAX"):
            continue
        value = _number(node.value)
        if value is not None:
            yield name, value, _doc(body[at + 1 : at + 2])


def _number(node: ast.expr) -> int | float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left), _number(node.right)
        if left is not None and right is not None:
            found: int | float = _OPERATORS[type(node.op)](left, right)
            return found
    return None


def _doc(following: list[ast.stmt]) -> str:
    if (
        following
        and isinstance(following[0], ast.Expr)
        and isinstance(following[0].value, ast.Constant)
    ):
        return " ".join(str(following[0].value.value).split())
    return ""


def _docs_of(path: Path, kind: str) -> dict[str, str]:
    tree = ast.parse(path.read_text())
    (body,) = [one.body for one in tree.body if isinstance(one, ast.ClassDef) and one.name == kind]
    return {
        field.target.id: _doc(body[at + 1 : at + 2])
        for at, field in enumerate(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def page(now: str) -> str:
    """Return the page with up-to-date tables."""
    for name, rows in (("settings", settings()), ("tenants", tenants()), ("fixed", fixed())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, _, rest = now.partition(begin)
        _, _, tail = rest.partition(end)
        now = f"{head}{begin}{chr(10).join(rows)}\n{end}{tail}"
    return now


def main() -> int:
    """Write the page, or with --check tell whether it is up to date."""
    now = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        return int(page(now) != now)
    PAGE.write_text(page(now))
    return 0


if __name__ == "__main__":
    sys.exit(main())
