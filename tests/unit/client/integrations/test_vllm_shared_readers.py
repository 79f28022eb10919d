"""A reader beside a shared pool is asked for its engine's blocks as long as somebody holds it."""

import gc
import weakref

from kvlease.integrations.vllm.shared import readers


class _Copies:
    """A reader."""

    def __init__(self, *blocks: int) -> None:
        self._blocks = set(blocks)

    def blocks_read(self) -> set[int]:
        """Return the blocks."""
        return self._blocks


def test_readers_tell_the_blocks_of_their_own_engine() -> None:
    """All readers of an engine are asked, and none of another engine's."""
    first, second, other = _Copies(1, 2), _Copies(2, 3), _Copies(4)
    for engine_id, reader in (("one", first), ("one", second), ("two", other)):
        readers.announce(engine_id, reader)

    assert readers.blocks_read("one") == {1, 2, 3}
    assert readers.blocks_read("two") == {4}


def test_reader_of_an_ended_engine_is_let_go() -> None:
    """A reader holds the pool's memory, so that what remembers it must not keep it."""
    reader = _Copies(1)
    readers.announce("ended", reader)
    assert readers.has_readers("ended")
    gone = weakref.ref(reader)

    del reader
    gc.collect()

    assert gone() is None
    assert not readers.has_readers("ended")
    assert readers.blocks_read("ended") == set()
