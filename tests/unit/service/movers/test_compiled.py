"""Compiled loops do what those in Python do, on every thread; where there are none, those in Python are taken."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvleased.movers import compiled
from kvleased.movers.compiled import CompiledLoops, loops
from kvleased.movers.rows import CHUNK_BYTES, Part, PythonLoops, runs_of

NUM_ROWS = 40


def _rows(random: np.random.Generator, row_bytes: int, gap_bytes: int) -> NDArray[np.uint8]:
    """Return rows of random bytes with a gap behind each."""
    rows = random.integers(0, 256, (NUM_ROWS, row_bytes + gap_bytes), np.uint8)
    return rows[:, :row_bytes]


part_shapes = st.tuples(
    st.sampled_from([1, 16, 241, 4096, CHUNK_BYTES, CHUNK_BYTES + 1]),
    st.sampled_from([0, 7]),
    st.sampled_from([0, 64]),
    st.booleans(),
)


@given(
    shapes=st.lists(part_shapes, min_size=1, max_size=3),
    pairs=st.lists(
        st.tuples(st.integers(0, NUM_ROWS - 1), st.integers(0, NUM_ROWS - 1)),
        max_size=NUM_ROWS,
        unique_by=lambda pair: pair[1],
    ),
    seed=st.integers(0, 9),
)
def test_compiled_loops_agree_with_those_in_python(
    shapes: list[tuple[int, int, int, bool]], pairs: list[tuple[int, int]], seed: int
) -> None:
    """Whatever the parts of a block, the same bytes are written, and no others, and the same sums are returned."""
    random = np.random.default_rng(seed)
    ids = np.array(sorted(pairs, key=lambda pair: pair[1]), np.int32).reshape(-1, 2)
    runs = runs_of(
        np.ascontiguousarray(ids[:, 0]),
        np.ascontiguousarray(ids[:, 1]),
        sum(num_bytes for num_bytes, *_ in shapes),
    )
    sources = [_rows(random, num_bytes, gap) for num_bytes, gap, _, _ in shapes]
    written, copied, expected = (
        [np.zeros((NUM_ROWS, num_bytes + gap), np.uint8) for num_bytes, _, gap, _ in shapes]
        for _ in range(3)
    )

    def parts(targets: list[NDArray[np.uint8]]) -> list[Part]:
        return [
            Part(source, target[:, : source.shape[1]], is_summed)
            for source, target, (*_, is_summed) in zip(sources, targets, shapes, strict=True)
        ]

    sums = CompiledLoops().copy_and_sum(parts(written), runs)
    CompiledLoops().copy(parts(copied), runs)
    wanted = PythonLoops().copy_and_sum(parts(expected), runs)

    assert (sums == wanted).all()
    for target, other, same in zip(written, copied, expected, strict=True):
        assert (target == same).all()
        assert (other == same).all()


def test_threads_sum_at_the_same_time() -> None:
    """Each thread has loops of its own, and every row has the sum of its own bytes."""
    rows = _rows(np.random.default_rng(1), 1000, 24)
    ids = np.arange(NUM_ROWS, dtype=np.int32)[::-1].copy()

    def summed(_: int) -> list[int]:
        return loops().sum(rows, ids).tolist()

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(summed, range(100)))

    assert found == [[xxhash.xxh3_64_intdigest(rows[row].tobytes()) for row in ids]] * 100


@pytest.mark.parametrize("missing", ["lupa.luajit21", "xxhash._xxhash"])
def test_loops_in_python_are_taken_where_none_can_be_compiled(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without LuaJIT, or whose xxhash hides its functions, has slower copies, and no others; the log says so.

    Each thread of a process makes loops of its own, but all for one reason, which is told once.
    """
    monkeypatch.setitem(sys.modules, missing, None)
    compiled._tell.cache_clear()

    made = [compiled._made(), compiled._made()]

    assert all(isinstance(one, PythonLoops) for one in made)
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["level"], told["event"]) == ("warning", "loops_not_compiled")
    assert missing in told["error"]


def test_loops_in_python_are_taken_where_no_memory_becomes_executable() -> None:
    """A daemon that systemd denies memory that was written and is executed has slower copies, too."""
    source = """
import ctypes
assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0  # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
from kvleased.movers.compiled import loops
print(type(loops()).__name__)
"""

    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )

    if "AssertionError" in done.stderr:
        pytest.skip("the kernel is older than 6.3")
    assert done.stdout == "PythonLoops\n", done.stderr
    assert "memory cannot be made executable" in json.loads(done.stderr)["error"]
