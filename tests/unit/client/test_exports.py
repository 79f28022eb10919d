"""Laws of the package's surface."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, get_origin

import pytest

import kvlease
from kvlease import errors

HEAVY = ("torch", "grpc", "fastapi", "transformers", "aiohttp", "pydantic", "uvicorn")


def test_every_public_name_loads() -> None:
    """Every name of `__all__` loads from the package, and `dir` lists no other name."""
    loaded: dict[str, Any] = {name: getattr(kvlease, name) for name in kvlease.__all__}

    assert all(value is not None for value in loaded.values())
    assert sorted(kvlease.__all__) == dir(kvlease)


def test_every_name_is_listed_where_it_lives() -> None:
    """The table of homes and the errors together make up `__all__`, so none is missing and none is stale."""
    homes = [name for names in kvlease._HOMES.values() for name in names]
    public_errors = [name for name in errors.__all__ if name.endswith("Error")]

    assert sorted([*homes, *public_errors]) == sorted(kvlease.__all__)
    for home, names in kvlease._HOMES.items():
        assert all(hasattr(importlib.import_module(home), name) for name in names)


def test_type_checkers_see_every_name_where_it_lives() -> None:
    """Type checkers import exactly the names that load lazily, from the same places."""
    tree = ast.parse(Path(kvlease.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {
        name.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    lazily = {name: home for home, names in kvlease._HOMES.items() for name in names}

    assert homes == dict.fromkeys(kvlease.__all__, "kvlease.errors") | lazily


def test_verbs_of_an_async_lease_make_tasks() -> None:
    """`asyncio.create_task` takes a coroutine, so the methods say that they return one."""
    verbs = ("extend", "commit", "fork", "explain", "trim", "evict", "reload", "map", "release")

    for verb in verbs:
        told = inspect.get_annotations(getattr(kvlease.AsyncLease, verb))["return"]
        assert get_origin(told) is Coroutine


_IN_TASKS: Final = {"Magazine": ["begin"]}
"""Methods by class that leave an answer for later, for which an event loop has tasks."""


@pytest.mark.parametrize("name", ["Client", "Worker", "Magazine", "Lease"])
def test_async_classes_offer_what_blocking_ones_do(name: str) -> None:
    """Every public name is in both classes and takes the same arguments with the same defaults."""
    blocking, other = (getattr(kvlease, one) for one in (name, f"Async{name}"))

    offered = _offered(blocking)
    for needless in _IN_TASKS.get(name, ()):
        del offered[needless]
    assert _offered(other) == offered


def _offered(of: type) -> dict[str, Any]:
    """Return what a class offers by name: the parameters of each method, or that it is something else."""
    found = {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}
    return {name: _arguments(value) if callable(value) else None for name, value in found.items()}


def _arguments(method: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(method).parameters.values()
    return [(one.name, one.kind, one.default) for one in parameters]


def test_all_names_import_nothing_heavy() -> None:
    """Using every public name imports no library of an engine or a server, and no transport's library."""
    program = f"""
import sys, kvlease
[getattr(kvlease, name) for name in kvlease.__all__]
print([name for name in {HEAVY!r} if name in sys.modules])
"""

    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert run.stdout.strip() == "[]"


def test_bare_import_loads_no_numpy() -> None:
    """Importing the package alone does not even load its own parts, since the daemon shares its ids and errors."""
    names = ("numpy", "google.protobuf", "kvlease.client")
    program = f"import sys, kvlease; print([n for n in {names!r} if n in sys.modules])"

    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert run.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that is not public is refused as in any module."""
    assert not hasattr(kvlease, "Manager")
