"""Answer the vectors of files and say which answers differ: `python tests/golden/run.py FILE...`.

Prints one JSON object per vector with `id`, `ok`, `got` and, where it differs or is explained, `why`; a file or a
vector that is not of the format gets one, too. Exits with 1 if any vector differs, and with 2 without a file.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvlease.errors import KVLeaseError
from tests.golden.compare import mismatches
from tests.golden.differences import explanation_of
from tests.golden.words import error_words

SUITES = {
    "plan": "planning",
    "spec_metrics": "specs",
    "merge_specs": "specs",
    "layout_strides": "layout",
    "allocate_views": "layout",
    "compressed_reshape": "layout",
    "resolve_layout": "layout_choice",
    "select_common_block_size": "kernel_blocks",
    "prepare_kernel_block_sizes": "kernel_blocks",
    "backend_supports": "kernel_blocks",
    "preferred_block_size": "kernel_blocks",
    "largest_kernel_block_within": "kernel_blocks",
    "customize_spec": "kernel_blocks",
    "hybrid_block_size": "kernel_blocks",
    "heterogeneous_block_size": "kernel_blocks",
    "block_table_width": "block_tables",
    "expand_block_table": "block_tables",
    "map_packed_cache": "layout",
    "slot_mapping_single": "block_tables",
    "row_ops": "block_tables",
    "tables_multi_group": "block_tables",
    "compressed_slot_mapping": "block_tables",
    "cpu_sizing": "cpu_offload",
    "simple_cpu_sizing": "cpu_offload",
    "offload_plan": "cpu_offload",
    "host_region": "cpu_offload",
    "sub_block_offsets": "cpu_offload",
    "transfer_regions": "cpu_offload",
}
"""The module under suites/ that answers each operation, with a function of the operation's name."""

_FIELDS = frozenset({"id", "op", "input", "expected"})
"""Fields that every vector has; tags only sort the vectors."""


def answer(op: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return our answer to the input, in the vectors' words; a refusal or a fault of ours is an `error`."""
    try:
        suite = importlib.import_module(f"tests.golden.suites.{SUITES[op]}")
        got: dict[str, Any] = getattr(suite, op)(given)
    except KVLeaseError as refusal:
        return {"error": error_words(refusal)}
    except Exception as fault:  # noqa: BLE001  # whatever it is, it is one vector's answer and must not stop the others
        kind = type(fault).__name__
        return {
            "error": {"type": kind, "class": f"UNHANDLED_{kind.upper()}", "message": str(fault)}
        }
    return got


def judge(vector: Any) -> dict[str, Any]:
    """Return the vector's id, whether our answer is right, the answer, and the reason if there is one."""
    if not isinstance(vector, dict) or not vector.keys() >= _FIELDS:
        missing = sorted(_FIELDS - set(vector)) if isinstance(vector, dict) else "it is no object"
        return _unreadable(vector, f"this is no vector: {missing}")
    try:
        return _judged(vector)
    except Exception as fault:  # noqa: BLE001  # a vector that cannot even be compared must not stop the others
        return _unreadable(vector, f"this vector cannot be judged: {type(fault).__name__}: {fault}")


def _judged(vector: dict[str, Any]) -> dict[str, Any]:
    got = answer(vector["op"], vector["input"])
    verdict = {"id": vector["id"], "ok": True, "got": got}
    found = list(_against(vector["expected"], got))
    if not found:
        return verdict
    explanation, broken = explanation_of(vector, got, found)
    if explanation and not broken:
        return {**verdict, "why": f"differs on purpose: {explanation}"}
    return {**verdict, "ok": False, "why": list(dict.fromkeys([*broken, *found]))[:20]}


def verdicts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the verdict of every vector of a file, or one verdict that says why the file has none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vectors = content["vectors"]
    except (OSError, ValueError, TypeError, KeyError) as fault:
        yield _unreadable({"id": str(path)}, f"this is no file of vectors: {fault}")
        return
    if not isinstance(vectors, list):
        yield _unreadable({"id": str(path)}, "this is no file of vectors: vectors is no list")
        return
    for vector in vectors:
        yield judge(vector)


def _unreadable(vector: Any, why: str) -> dict[str, Any]:
    found = vector.get("id") if isinstance(vector, dict) else None
    return {"id": found, "ok": False, "got": None, "why": [why]}


def main(paths: list[str]) -> int:
    """Judge all files; return 1 if any vector differs, 2 if there is no file."""
    if not paths:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    differs = False
    for path in paths:
        for verdict in verdicts(Path(path)):
            differs |= not verdict["ok"]
            sys.stdout.write(json.dumps(verdict, ensure_ascii=False) + "\n")
    return int(differs)


def _against(expected: dict[str, Any], got: dict[str, Any]) -> Iterator[str]:
    """Yield how an answer differs; where the reference crashed, any answer but a fault of ours is right."""
    crashed = expected.get("error", {}).get("class", "").startswith("UNHANDLED_")
    if crashed and "error" not in got:
        return iter(())
    return mismatches(expected, got)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
