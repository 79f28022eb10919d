"""Laws of a process that lacks what GPU memory needs: it is told what is missing; `tests/gpu` has the rest."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[4]
WITHOUT_BINDINGS: Final = """
import sys
sys.modules["cuda.bindings"] = None
from kvlease.memory.cuda import visible_devices
try:
    visible_devices()
except Exception as error:
    print(type(error).__name__, error.rule, error)
"""
IMPORTS: Final = """
import sys
import kvlease.memory.cuda, kvlease.memory.mapped, kvlease.worker
import kvleased.memory.cuda, kvleased.movers.gpu.engine, kvleased.caches.tiers
print(*[name for name in sys.modules if name.startswith("cuda.")])
"""


def _printed(script: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


def test_process_without_the_bindings_is_told_what_to_install() -> None:
    """The missing libraries are an extra, and the refusal names it."""
    said = _printed(WITHOUT_BINDINGS)

    assert said.startswith("InvalidError no_bindings")
    assert "pip install 'kvlease[cuda]'" in said


def test_nothing_of_cuda_is_imported_before_it_is_used() -> None:
    """Modules that may use a GPU can be imported without one, and without its libraries."""
    pytest.importorskip("cuda.bindings")

    assert not _printed(IMPORTS)
