"""Laws of the core's package: it gives the cache to those that ask for it, and imports nothing for the others."""

import subprocess
import sys

import pytest

from kvleased import core
from kvleased.core import cache, shape


def test_names_of_the_package_are_those_of_its_modules() -> None:
    """The package's names are those of its modules, and no others."""
    assert (core.Cache, core.CacheShape) == (cache.Cache, shape.CacheShape)
    assert not hasattr(core, "no_such_name")


@pytest.mark.parametrize("mover", ["engine", "disk.engine", "remote.engine"])
def test_mover_does_not_import_what_decides(mover: str) -> None:
    """A mover imports nothing of the core but the words of its orders."""
    script = (
        f"import sys, kvleased.movers.{mover}; "
        "sys.exit('kvleased.core.effects' not in sys.modules or 'kvleased.core.cache' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", script], check=False)

    assert done.returncode == 0
