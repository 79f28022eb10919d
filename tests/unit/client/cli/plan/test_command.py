"""Laws of `kvlease plan`: what it prints is the daemon's own arithmetic, at any width, and refusals say what to do."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvlease.cli.plan import planner as planners
from kvlease.cli.plan.command import plan_command
from kvlease.errors import InvalidError
from kvlease.plan import EngineInputs, PlanInputs
from kvlease.spec import FullAttention, SlidingWindow, StateSpace, spec_to_fields
from kvleased.planning import plan, report

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
FULL = FullAttention(name="c", num_kv_heads=1, head_size=128, dtype="float16")
WINDOW = SlidingWindow(name="a", num_kv_heads=1, head_size=128, dtype="float16", window_tokens=1000)
COARSE = StateSpace(name="d", shapes=((300,),), dtypes=("float16",), tokens_per_block=1024)
STATE = StateSpace(name="b", shapes=((3000,),), dtypes=("float16",))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the directory of a model with a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """Return a file with two groups of layers."""
    path = tmp_path / "layers.json"
    path.write_text(json.dumps([spec_to_fields(layer) for layer in (WINDOW, STATE)]))
    return path


def run(*arguments: object, columns: int = 120) -> tuple[int, str, str]:
    """Return the exit status, output and errors of `kvlease plan`."""
    app = typer.Typer()
    app.command()(plan_command)
    runner = CliRunner(env={"COLUMNS": str(columns)})
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_plan_that_no_daemon_registers_says_what_to_set(specs: Path) -> None:
    """Where blocks are given back, block 0 must not be granted, and the plan says so before a registration would."""
    specs.write_text(json.dumps([spec_to_fields(layer) for layer in (WINDOW, FULL)]))
    pool = ("--specs", specs, "--device-blocks", 640, "--longest-request", 1000)

    _, without, _ = run(*pool)
    _, having, _ = run(*pool, "--null-blocks", 1)

    assert "set --null-blocks 1" in without
    assert "to register" not in having


def test_json_is_the_plan(model: Path) -> None:
    """The JSON has the same plan, report and comparison that the daemon makes of the same inputs."""
    status, output, _ = run(
        "--model", model, "--device-memory", "8GiB", "--longest-request", "1000", "--json",
        "--what-if", "tokens_per_block=8",
    )  # fmt: skip
    inputs = PlanInputs(
        model_config=json.dumps(CONFIG),
        tokens_per_block=16,
        device_bytes=8 * 2**30,
        longest_request_tokens=1000,
    )
    expected = plan(inputs)
    answer = json.loads(output)

    assert status == 0
    assert answer["plan"]["layout_fingerprint"] == expected.layout_fingerprint
    assert answer["plan"]["groups"][0]["spec"]["kind"] == "full_attention"
    assert len(answer["report"]["equations"]) == len(report(inputs, expected).equations)
    assert answer["what_ifs"][0]["after"]["num_blocks"] == 2 * expected.num_blocks


def test_answer_says_what_fits_first(model: Path) -> None:
    """The answer begins with what fits, and then shows where every number comes from."""
    status, output, _ = run(
        "--model", model / "config.json", "--device-memory", "8GiB", "--host-memory", "1GiB"
    )

    assert status == 0
    assert "4,096 blocks of 2.00 MiB" in output
    assert "65,536 tokens take 4,096 blocks (8.00 GiB)" in output
    assert "512 slots of 1 block, 2.00 MiB each" in output
    assert "= floor(device_bytes / bytes_per_block) = floor(8589934592 / 2097152)" in output
    assert output.index("What fits") < output.index("Groups") < output.index("Where the numbers")


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120, 200])
def test_answer_fits_the_terminal(specs: Path, columns: int) -> None:
    """No line is wider than the terminal, and nothing is cut off."""
    status, output, errors = run(
        "--specs", specs, "--device-memory", "64MiB", "--null-blocks", 1, "--host-memory", "8MiB",
        "--state-mode", "align", "--what-if", "all", "--what-if", "device_bytes=1KiB", columns=columns,
    )  # fmt: skip

    assert (status, errors) == (0, "")
    assert max(map(len, output.splitlines())) <= columns
    assert "…" not in output
    assert "sliding window" in output
    assert "state space" in output
    assert "uneven_groups" in output
    assert "device_bytes=1KiB: NEVER_FITS" in " ".join(output.split())


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120, 200])
def test_numbers_are_whole_at_any_width(model: Path, columns: int) -> None:
    """Every number of a comparison and of every group is shown with its name and all its digits."""
    status, output, _ = run(
        "--model", model, "--device-memory", "80GiB", "--longest-request", 8192, "--what-if", "all",
        columns=columns,
    )  # fmt: skip
    words = output.split()

    assert status == 0
    assert words.count("1,310,720") >= 6
    assert {"40,960", "81,920", "20,480", "85,899,345,920"} <= set(words)
    for name in (
        "change",
        "capacity",
        "longest",
        "a block",
        "host slots",
        "tokens a block",
        "kernel blocks",
    ):
        assert name in output


def test_one_of_something_is_said_so(model: Path) -> None:
    """One block, one layer or one token is written in the singular."""
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    _, output, _ = run("--model", model, "--device-blocks", 1, "--longest-request", 1)

    assert "1 layer in 1 group" in output
    assert "1 block of" in output
    assert "1 token takes 1 block " in output
    assert "1 entry" in output


def test_notes_name_options(specs: Path) -> None:
    """Facts that people may not expect are noted, with the option that changes them."""
    (specs.parent / "b.json").write_text(
        json.dumps([spec_to_fields(layer) for layer in (FULL, COARSE)])
    )
    _, output, _ = run(
        "--specs", specs.parent / "b.json", "--device-memory", "64MiB", "--longest-request", 100,
    )  # fmt: skip
    note = " ".join(output.partition("Notes")[2].partition("Groups")[0].split())

    assert note.startswith(
        "- no prefix is ever found, because a prefix that is found ends at a multiple of"
    )
    assert note.endswith(
        "and the longest request has 100; prefixes would be found with --state-mode align"
    )


def test_every_setting_has_its_option(model: Path) -> None:
    """Each setting that a what-if or a remedy names can be given as an option, with the same meaning."""
    status, output, _ = run(
        "--model", model, "--device-memory", "8GiB", "--longest-request", 99999, "--fit",
        "--steps-in-flight", 2, "--lookahead-tokens", 3, "--encoder-tokens", 4, "--no-prefix-caching",
        "--match-tokens", 16, "--one-group", "--host-memory", "1GiB", "--blocks-per-slot", 2, "--json",
    )  # fmt: skip
    inputs = PlanInputs(
        model_config=json.dumps(CONFIG),
        tokens_per_block=16,
        device_bytes=2**33,
        host_bytes=2**30,
        blocks_per_slot=2,
        longest_request_tokens=99999,
        fit_longest_request=True,
        engine=EngineInputs(
            steps_in_flight=2,
            lookahead_tokens=3,
            encoder_tokens_max=4,
            prefix_caching=False,
            match_tokens=16,
            one_group=True,
        ),
    )
    expected = plan(inputs)
    answer = json.loads(output)["plan"]

    assert status == 0
    assert answer["num_slots"] == expected.num_slots == 256
    assert answer["longest_request_tokens"] == expected.longest_request_tokens == 65536
    assert (answer["usable_blocks"], answer["concurrency"]) == (4096, 1.0)


def test_share_is_of_the_budget(model: Path) -> None:
    """Waste is a part of the budget, and so never more than all of it."""
    _, output, _ = run("--model", model, "--device-memory", "80GiB", "--device-blocks", 10)

    assert "79.98 GiB   100.0 %" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(["--device-memory", "1MiB"], "NEVER_FITS", id="no block fits"),
        pytest.param(["--device-memory", "lots"], "INVALID", id="memory unclear"),
        pytest.param([], "give --device-memory, such as 80GiB, or --device-blocks", id="no budget"),
        pytest.param(["--longest-request", "long"], "number of tokens, or auto", id="no length"),
        pytest.param(
            ["--longest-request", "9" * 5000], "number of tokens, or auto", id="too many digits"
        ),
        pytest.param(
            ["--match-tokens", "9" * 5000], "number of tokens, or none", id="more than any unit"
        ),
        pytest.param(["--device-blocks", "9", "--what-if", "x=1"], "not a setting", id="no change"),
        pytest.param(
            ["--device-blocks", "9", "--what-if", "tokens_per_block=x"],
            "tokens_per_block is 'x'",
            id="no value",
        ),
        pytest.param(
            ["--device-blocks", "9", "--match-tokens", "x"],
            "number of tokens, or none",
            id="no match",
        ),
        pytest.param(["--device-blocks", "9", "--specs", "x"], "but not both", id="two sources"),
        pytest.param(
            ["--device-blocks", "9", "--plot", "x.gif"], "must end in .png or .svg", id="no drawing"
        ),
        pytest.param(
            ["--device-blocks", "9", "--plot", "/no/where.svg"], "cannot write", id="no place"
        ),
    ],
)
def test_refusal_is_printed_and_fails(model: Path, arguments: list[str], complaint: str) -> None:
    """A plan that cannot be made ends with status 2, and its code and reason go to standard error."""
    status, _, errors = run("--model", model, *arguments)

    assert status == 2
    assert complaint in errors


def test_refusal_lists_what_would_work(model: Path) -> None:
    """Each remedy is written as a command-line option."""
    _, output, errors = run(
        "--model", model, "--device-memory", "8GiB", "--longest-request", "65537"
    )

    assert not output
    assert "there is a plan with" not in errors
    assert errors.splitlines()[-4:] == [
        "What would work:",
        "  - --longest-request 65536",
        "  - --device-memory 8592031744  (8.00 GiB)",
        "  - --kv-dtype fp8",
    ]


def test_refusal_as_json_is_a_problem(model: Path) -> None:
    """The JSON of a refusal has its rule as the reason, and the settings that would work."""
    status, output, errors = run("--model", model, "--device-memory", "1MiB", "--json")
    problem = json.loads(errors)

    assert (status, output) == (2, "")
    assert (problem["code"], problem["rule"]) == ("NEVER_FITS", "auto_fit_failed")
    assert problem["remedies"]


def test_auto_is_what_the_model_was_made_for(model: Path) -> None:
    """With auto, the longest request is the model's own, or the longest that fits."""
    large = json.loads(run("--model", model, "--device-memory", "80GiB", "--json")[1])
    small = json.loads(run("--model", model, "--device-memory", "8GiB", "--json")[1])

    assert large["plan"]["longest_request_tokens"] == 131072
    assert small["plan"]["longest_request_tokens"] == 65536


def test_plot_without_matplotlib_says_what_to_install(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where matplotlib is missing, the refusal names it and the command that installs it."""
    monkeypatch.setitem(sys.modules, "kvlease.cli.plan.plot", None)
    status, _, errors = run("--model", model, "--device-blocks", 9, "--plot", "x.svg")

    assert status == 2
    assert 'pip install ".[plot]"' in errors


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("{", "is not JSON", id="no JSON"),
        pytest.param('{"kind": "mla"}', "must be a JSON list", id="no list"),
        pytest.param("[]", "the file lists no layers", id="no layer"),
        pytest.param("[3]", "layers[0] of", id="no object"),
        pytest.param('[{"kind": "tea"}]', "docs/specs.md says", id="no kind"),
        pytest.param(
            '[{"kind": "mla", "name": "a", "head_size": null, "dtype": "int8"}]',
            "layers[0].head_size of layer 'a' must be an integer, not None",
            id="no number",
        ),
    ],
)
def test_specs_that_are_none_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    """A file of layers is read strictly, and refused if it is none."""
    path = tmp_path / "specs.json"
    path.write_text(text)

    status, _, errors = run("--specs", path, "--device-blocks", 9)

    assert status == 2
    assert complaint in " ".join(errors.split())


@pytest.mark.parametrize("name", ["no/model", "not a name", "/no/where"])
def test_missing_model_is_refused(name: str) -> None:
    """A name that is neither a path nor in the local cache is repeated in the refusal, and nothing is downloaded."""
    status, _, errors = run("--model", name, "--device-blocks", 1)

    assert status == 2
    assert "nothing is downloaded" in " ".join(errors.split())


def test_plan_of_nothing_says_what_to_give() -> None:
    """Without a model there are not two of them, either."""
    code, _, errors = run()

    assert code == 2
    assert "give --model, such as a config.json, or a list of layers as --specs" in errors
    assert "both" not in errors


def test_name_that_no_file_can_have_is_refused() -> None:
    """A path at which the system does not even look is refused with the system's reason."""
    code, _, errors = run("--model", "a" * 300, "--device-memory", "8GiB")

    assert code == 2
    assert "File name too long" in " ".join(errors.split())


def test_missing_config_is_refused(tmp_path: Path) -> None:
    """A directory without a config is repeated in the refusal."""
    assert "cannot read" in run("--model", tmp_path, "--device-blocks", 1)[2]


def test_model_is_found_in_the_local_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name on the Hugging Face hub is looked up in the local cache only."""
    snapshot = model / "models--org--name" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(model))

    assert run("--model", "org/name", "--device-blocks", 1)[0] == 0


@pytest.mark.parametrize("option", ["--model", "--specs"])
def test_file_that_does_not_end_is_refused(option: str) -> None:
    """A file that is no model description, such as weights, is not read into memory."""
    code, _, refused = run(option, "/dev/zero", "--device-blocks", 1)

    assert code == 2
    assert "/dev/zero has more than 16777216 bytes" in refused
    assert "config.json" in refused


def test_without_the_hub_only_paths_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hub's library, a model can still be named by its path."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    assert "nothing is downloaded" in " ".join(
        run("--model", "org/name", "--device-blocks", 1)[2].split()
    )


def test_missing_planner_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the planner, which comes with the service, is missing, the refusal says how to install it."""
    monkeypatch.setattr(planners, "entry_points", lambda group: ())  # noqa: ARG005

    with pytest.raises(InvalidError, match=r'pip install "\.\[service\]"'):
        planners.find_planner()
