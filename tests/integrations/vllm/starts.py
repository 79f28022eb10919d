"""Own events between the start of an engine's ranks and that of its scheduler."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.integrations.vllm.births import until
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import Job, Life

HELD_BY: Final = "KVLEASE_TEST_HELD_BY"
"""The variable that names the file of `held.py`."""


@contextmanager
def started(job: Job, folder: Path, between: Callable[[Life], None]) -> Iterator[Life]:
    """Run a life; call `between` in its start, once its ranks have the pool."""
    life = Life(job, folder / "life.log")
    mark = Path(job.environment[HELD_BY])
    life.start()
    try:
        until(mark.exists, "the ranks do not come")
        between(life)
        mark.unlink()
        life.ready()
        yield life
        assert not life.signs_of_bugs(), life.told()
    finally:
        life.close()


def shut_out(daemon: Daemon, what: str, stack: ExitStack) -> None:
    """Keep all workers from attaching until the stack ends."""
    if what == "frozen":
        daemon.freeze()
        stack.callback(daemon.thaw)
    else:
        (cache,) = daemon.caches()
        client = stack.enter_context(daemon.client())
        stack.enter_context(client.attach(cache.cache))
