"""Spans cover each byte of a batch once, are as few as possible, and cross no boundary that counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvleased.movers.gpu.pins import Pins
from kvleased.movers.spans import End, Spans, Way
from tests.unit.service.movers.gpu.gpu_memory import Pinner

NUM_BLOCKS = 16
BASE, OTHER = 1 << 20, 1 << 30


def _ids(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, np.int32)


def _bytes_of(spans: Spans) -> dict[int, int]:
    """Return the source of each byte that is written, and check that none is written twice."""
    found: dict[int, int] = {}
    for source, target, num_bytes in zip(
        spans.sources.tolist(), spans.targets.tolist(), spans.num_bytes.tolist(), strict=True
    ):
        assert num_bytes > 0
        for offset in range(num_bytes):
            assert target + offset not in found
            found[target + offset] = source + offset
    return found


ways = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(
    lambda sizes: [
        Way(
            End(BASE + sum(sizes[:index]) * NUM_BLOCKS, size),
            End(OTHER + sum(sizes[:index]), sum(sizes)),
            size,
        )
        for index, size in enumerate(sizes)
    ]
)


@given(
    ways=ways,
    sources=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS),
    targets=st.permutations(range(NUM_BLOCKS)),
)
def test_spans_are_the_bytes_of_the_batch(
    ways: list[Way], sources: list[int], targets: list[int]
) -> None:
    """Every byte of every piece goes once to its place, and no two spans could be merged."""
    pairs = list(zip(sources, targets, strict=False))

    spans = Spans.of(ways, _ids(*sources), _ids(*targets[: len(sources)]))

    assert _bytes_of(spans) == {
        way.target.address + target * way.target.stride_bytes + offset: way.source.address
        + source * way.source.stride_bytes
        + offset
        for way in ways
        for source, target in pairs
        for offset in range(way.num_bytes)
    }
    ends = zip(spans.sources + spans.num_bytes, spans.targets + spans.num_bytes, strict=True)
    assert not set(ends) & set(zip(spans.sources, spans.targets, strict=True))
    assert spans.total_bytes == len(pairs) * sum(way.num_bytes for way in ways)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    chunk_bytes=st.integers(1, 50),
    at_source=st.booleans(),
)
def test_cut_spans_move_the_same_and_cross_no_boundary(
    sizes: list[int], chunk_bytes: int, *, at_source: bool
) -> None:
    """Cutting changes no byte and leaves no part in two chunks; with chunks large enough nothing is cut."""
    starts = np.cumsum([0, *sizes[:-1]]) * 2
    spans = Spans(BASE + starts, OTHER + starts, np.array(sizes, np.int64))
    origin = BASE if at_source else OTHER

    cut = spans.cut(origin, chunk_bytes, at_source=at_source)

    ends = cut.sources if at_source else cut.targets
    assert _bytes_of(cut) == _bytes_of(spans)
    assert (
        (ends - origin) // chunk_bytes == (ends + cut.num_bytes - 1 - origin) // chunk_bytes
    ).all()
    assert len(spans.cut(origin, 1 << 20, at_source=at_source)) == len(spans)


def test_adjacent_blocks_are_one_span() -> None:
    """Blocks of one piece that are adjacent at both ends are one span, in whatever order they are named."""
    way = Way(End(BASE, 64), End(OTHER, 64), 64)

    spans = Spans.of([way], _ids(5, 3, 4, 9), _ids(8, 6, 7, 0))

    assert spans.targets.tolist() == [OTHER, OTHER + 6 * 64]
    assert spans.num_bytes.tolist() == [64, 3 * 64]


def test_pieces_that_are_adjacent_in_both_are_one_span() -> None:
    """A block whose pieces are adjacent at both ends is one span."""
    pieces = [Way(End(BASE + at, 64), End(OTHER + at, 64), 16) for at in (0, 16, 32, 48)]

    spans = Spans.of(pieces, _ids(2, 3), _ids(1, 5))

    assert spans.num_bytes.tolist() == [64, 64]


def test_nothing_is_no_span() -> None:
    """A batch without blocks, or of blocks without pieces, has no span."""
    way = Way(End(BASE, 64), End(OTHER, 64), 64)

    assert len(Spans.of([way], _ids(), _ids())) == len(Spans.of([], _ids(1), _ids(2))) == 0


def test_copies_are_parted_by_what_is_pinned() -> None:
    """Spans of pinned and of other memory are separate, cut where chunks end."""
    host = np.zeros(100, np.uint8)
    start = host.ctypes.data
    pins = Pins(Pinner(), host, chunk_bytes=40)
    pins.pin_next()
    spans = Spans(np.array([BASE]), np.array([start + 30]), np.array([60]))

    parts = list(pins.sorted(spans, host_is_source=False))

    assert [(part.targets.tolist(), part.num_bytes.tolist(), kind) for part, kind in parts] == [
        ([start + 30], [10], True),
        ([start + 40, start + 80], [40, 10], False),
    ]


def test_pinning_ends_where_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """If pinning is refused, that is said once and not tried again, and what was pinned is unpinned."""
    host = np.zeros(100, np.uint8)
    pinner = Pinner(ranges_max=1)
    pins = Pins(pinner, host, chunk_bytes=40)

    for _ in range(pins.num_chunks):
        pins.pin_next()

    assert (pins.num_chunks, pins.pinned_bytes, pinner.ranges) == (3, 40, {host.ctypes.data: 40})
    assert capsys.readouterr().err.count("host_pool_not_pinned") == 1
    pins.close()
    assert not pinner.ranges


def test_last_chunk_ends_with_the_pool() -> None:
    """All of the pool is pinned, and nothing behind it."""
    host = np.zeros(100, np.uint8)
    pinner = Pinner()
    pins = Pins(pinner, host, chunk_bytes=40)

    for _ in range(pins.num_chunks):
        pins.pin_next()

    assert sorted(pinner.ranges.values()) == [20, 40, 40]
    assert pins.pinned_bytes == 100
