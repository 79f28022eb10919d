"""Laws of the judge of golden vectors: it accepts neither our faults nor differences without a reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.compare import mismatches
from tests.golden.run import judge, main

WIDTH = {
    "id": "w",
    "op": "block_table_width",
    "tags": [],
    "input": {"max_num_blocks": 5, "block_size": 16, "token_alignment": 128},
    "expected": {"width": 8},
}


def file_of(directory: Path, *vectors: dict[str, Any]) -> str:
    """Return the path of a file with these vectors."""
    path = directory / "vectors.json"
    path.write_text(json.dumps({"vectors": vectors}))
    return str(path)


def test_right_answer_is_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with only right answers ends with 0, and each line has id, ok and got."""
    code = main([file_of(tmp_path, WIDTH)])

    assert code == 0
    assert json.loads(capsys.readouterr().out) == {"id": "w", "ok": True, "got": {"width": 8}}


def test_wrong_answer_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single wrong answer is enough, and its line says where it differs."""
    code = main([file_of(tmp_path, WIDTH, {**WIDTH, "expected": {"width": 9}})])

    assert code == 1
    assert json.loads(capsys.readouterr().out.splitlines()[1])["why"] == [
        ".width: expected 9, got 8"
    ]


@pytest.mark.parametrize("broken", [{"op": "unheard_of"}, {"input": {}}], ids=["op", "input"])
def test_fault_is_an_answer_and_not_a_crash(broken: dict[str, Any]) -> None:
    """A fault of our code is reported as an error of its own kind, and is not ok."""
    verdict = judge({**WIDTH, **broken})

    assert not verdict["ok"]
    assert verdict["got"]["error"]["class"] == "UNHANDLED_KEYERROR"


def test_fault_is_no_clean_refusal() -> None:
    """Where the reference crashed, our refusal is right, and our fault is not."""
    crashed = {"error": {"type": "TypeError", "class": "UNHANDLED_TYPEERROR"}}
    refused = {**WIDTH["input"], "token_alignment": 0}  # type: ignore[dict-item]

    assert judge({**WIDTH, "input": refused, "expected": crashed})["ok"]
    assert not judge({**WIDTH, "input": {}, "expected": crashed})["ok"]


def test_strides_of_single_entries_mean_nothing() -> None:
    """Strides are compared except for dimensions with one entry."""
    expected = {"shape": [4, 1], "stride": [8, 3]}

    assert not list(mismatches(expected, {"shape": [4, 1], "stride": [8, 7]}))
    assert list(mismatches(expected, {"shape": [4, 1], "stride": [9, 3]}))


def test_same_as_stands_for_an_earlier_entry() -> None:
    """An entry that is the same as an earlier one is compared with that one."""
    expected = [{"n": 1}, {"same_as": 0}]

    assert not list(mismatches(expected, [{"n": 1}, {"n": 1}]))
    assert list(mismatches(expected, [{"n": 1}, {"n": 2}]))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"vectors": 3}', '{"vectors": {}}'],
    ids=["empty", "list", "object", "number", "map"],
)
def test_file_of_another_format_is_said_so(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file without vectors ends with 1 and a line that says why; so does a missing file."""
    path = tmp_path / "other.json"
    path.write_text(text)

    assert main([str(path), str(tmp_path / "none.json")]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["ok"] for line in lines] == [False, False]
    assert all("no file of vectors" in line["why"][0] for line in lines)


@pytest.mark.parametrize("broken", [3, {}, {"id": "x"}, {**WIDTH, "expected": 7}])
def test_broken_vector_does_not_stop_the_others(
    broken: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vector that cannot be judged is not ok, and the vectors after it are judged."""
    code = main([file_of(tmp_path, broken, WIDTH)])

    verdicts = [json.loads(line)["ok"] for line in capsys.readouterr().out.splitlines()]
    assert (code, verdicts) == (1, [False, True])


def test_no_file_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file the usage is shown, and the status is 2."""
    assert main([]) == 2
    assert "FILE" in capsys.readouterr().err
