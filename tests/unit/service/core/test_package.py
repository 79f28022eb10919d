"""Laws of the core's package: whoever asks has the cache, and who does not, does not import it."""

import subprocess
import sys

import pytest

from kvleased import core
from kvleased.core import cache, shape


def test_names_of_the_package_are_those_of_its_modules() -> None:
    """What the package names is what its modules have; it names nothing else."""
    assert (core.Cache, core.CacheShape) == (cache.Cache, shape.CacheShape)
    assert not hasattr(core, "no_such_name")


@pytest.mark.parametrize("mover", ["engine", "disk.engine", "remote.engine"])
def test_mover_does_not_import_what_decides(mover: str) -> None:
    """A mover starts without the core, but for the words in which it is told what to do."""
    script = (
        f"import sys, kvleased.movers.{mover}; "
        "sys.exit('kvleased.core.effects' not in sys.modules or 'kvleased.core.cache' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", script], check=False)

    assert done.returncode == 0
