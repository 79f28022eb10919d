"""Write the tables of docs/specs.md from the code: `python docs/write_specs.py`; `--check` compares them."""

import ast
import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from kvlease._checks import field_types
from kvlease.spec import BYTES_PER_ELEMENT, KINDS, QUANTISATIONS, AttentionSpec, LayerSpec

PAGE = Path(__file__).with_name("specs.md")
_START = "<!-- written by write_specs.py -->\n"
_END = "<!-- end of what is written -->\n"
_HEAD = "| field | type | default | range | what it says |\n|---|---|---|---|---|\n"
_TYPES = {int: "integer", str: "string", bool: "true, false"}
_SEVERAL = {int: "integers", str: "strings"}


def page(text: str) -> str:
    """Return the page with up-to-date tables."""
    before, _, rest = text.partition(_START)
    _, _, after = rest.partition(_END)
    return f"{before}{_START}\n{_tables()}\n{_END}{after}"


def _tables() -> str:
    parts = [
        "### Every kind\n\n" + _table(LayerSpec, ()),
        "### Every kind of attention: all but `state_space`\n\n"
        + _table(AttentionSpec, (LayerSpec,)),
    ]
    for kind, spec in KINDS.items():
        parent = AttentionSpec if issubclass(spec, AttentionSpec) else LayerSpec
        parts.append(f"### `{kind}`\n\n{inspect.getdoc(spec)}\n\n{_table(spec, (parent,))}")
    parts.append(_values("`dtype` and `dtypes`", BYTES_PER_ELEMENT))
    parts.append(_values("`quantisation`", QUANTISATIONS))
    return "\n".join(parts)


def _values(of: str, values: Any) -> str:
    return f"### Values of {of}\n\n{', '.join(f'`{value}`' for value in values)}\n"


def _table(spec: type[LayerSpec], parents: tuple[type[LayerSpec], ...]) -> str:
    """Return a table of the fields that a class adds to its parents', or whose defaults it changes."""
    known = {field.name: field for parent in parents for field in dataclasses.fields(parent)}
    rows = [
        _row(spec, field)
        for field in dataclasses.fields(spec)
        if field.name not in known or known[field.name].default != field.default
    ]
    return _HEAD + "".join(rows) if rows else "It has no fields of its own.\n"


def _row(spec: type[LayerSpec], field: "dataclasses.Field[Any]") -> str:
    cells = (
        f"`{field.name}`",
        _type(field_types(spec)[field.name]),
        _default(field.default),
        _range(spec, field.name),
        _doc(spec, field.name),
    )
    return f"| {' | '.join(cells)} |\n"


def _type(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"list of {_SEVERAL.get(get_args(hint)[0], 'lists of integers')}"
    kinds = get_args(hint) or (hint,)
    said = " or ".join(_TYPES[kind] for kind in kinds if kind is not NoneType)
    return f"{said}, null" if NoneType in kinds else said


def _default(default: object) -> str:
    return "**required**" if default is dataclasses.MISSING else f"`{json.dumps(default)}`"


def _range(spec: type[LayerSpec], name: str) -> str:
    for kind in spec.__mro__:
        if name in vars(kind).get("bounds", {}):
            least, most = vars(kind)["bounds"][name]
            is_one = name == "num_kv_heads" and getattr(spec, "has_one_head", False)
            return "1" if is_one else f"{least} to {most}"
    return ""


def _doc(spec: type[LayerSpec], name: str) -> str:
    """Return a field's docstring, from the last class that has one."""
    for kind in spec.__mro__:
        said = _docs(kind).get(name) if issubclass(kind, LayerSpec) else None
        if said:
            return re.sub(r"\bNone\b", "null", said)
    return ""


def _docs(kind: type) -> dict[str, str]:
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef), "the source of a class"
    return {
        field.target.id: doc.value.value
        for field, doc in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


def main() -> int:
    """Write the page, or with --check tell whether it is up to date."""
    now = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        return int(page(now) != now)
    PAGE.write_text(page(now))
    return 0


if __name__ == "__main__":
    sys.exit(main())
