"""Own the laws of `kvlease plan --vllm`: vLLM's words mean what they mean in vLLM, and unknown ones are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvlease.cli.app import app
from kvlease.cli.plan.settings import VLLM, as_options, with_options
from kvlease.cli.plan.vllm.arguments import read_arguments
from kvlease.cli.plan.vllm.choices import SPLIT_CHUNKS_VARIABLE
from kvlease.cli.plan.vllm.table import SWITCHES, VALUES
from kvlease.errors import InvalidError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 512,
    "max_position_embeddings": 4096,
}
WINDOWS = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
CHUNKS = {
    "model_type": "llama4_text",
    "architectures": ["Llama4ForCausalLM"],
    "attention_chunk_size": 512,
    "layer_types": ["chunked_attention", "full_attention"] * 2,
    "no_rope_layers": [1, 0, 1, 0],
}

RECURRENT = {
    "model_type": "falcon_h1",
    "architectures": ["FalconH1ForCausalLM"],
    "mamba_d_conv": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 256,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M*M-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 1,
    "ssm_state_size": 16,
    "conv_kernel": 4,
}
STATES_ALONE = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "intermediate_size": 512,
    "state_size": 16,
    "conv_kernel": 4,
}

MEMORY = ("--kv-cache-memory-bytes", "64M")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the directory of a model."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(*words: object) -> Result:
    """Run `kvlease plan`."""
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def plan(*words: object) -> dict[str, Any]:
    """Return the plan that is printed as JSON."""
    result = run("--json", *words)
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)["plan"]
    return made


def test_arguments_of_vllm_give_the_plan_of_our_own(model: Path) -> None:
    """Arguments of vLLM and our own options for the same numbers give the same plan."""
    theirs = plan(
        *("--vllm", "serve", model, "--kv-cache-memory-bytes", "64M", "-tp", 2),
        *("--max_model_len=2k", "--block-size", 32, "--max-num-batched-tokens", 512),
    )
    ours = plan(
        *("--model", model, "--device-memory", "64MiB", "--tensor-ranks", 2, "--null-blocks", 1),
        *("--longest-request", 2000, "--tokens-per-block", 32, "--tokens-per-step", 512),
        *("--steps-in-flight", 2, "--layout", "LBNHC", "--kv-dtype", "bfloat16"),
    )

    assert theirs == ours


def test_defaults_of_vllm_are_written_down(model: Path) -> None:
    """Without arguments, the block, the layout and the longest request are vLLM's defaults for the platform."""
    on_gpu = plan("--vllm", model, "--kv-cache-memory-bytes", "64M")
    on_cpu = plan("--platform", "cpu", "--vllm", model, "--kv-cache-memory-bytes", "64M")

    assert (on_gpu["tokens_per_block"], on_gpu["layout"]) == (16, "LBNHC")
    assert (on_cpu["tokens_per_block"], on_cpu["layout"]) == (128, "LBHNC")
    assert on_gpu["longest_request_tokens"] == on_cpu["longest_request_tokens"] == 4096


def test_share_of_the_memory_is_what_weights_leave(model: Path) -> None:
    """The cache gets the share of the device that vLLM may take, less what an engine logs for all else."""
    made = plan(
        *("--device-memory", "10GiB", "--other-memory", "8GiB"),
        *("--vllm", model, "--gpu-memory-utilization", 0.9),
    )

    assert made["ranks"][0]["device_bytes"] == (1 << 30) // 16384 * 16384


def test_arguments_without_bearing_are_listed(model: Path) -> None:
    """An argument on which a plan does not depend is listed, whatever its value."""
    result = run(
        *("--vllm", model, "--kv-cache-memory-bytes", "64M", "--api-key", "a", "b"),
        *("--no-enable-log-requests", "--port=1"),
    )

    assert (
        "These arguments do not affect the plan: --api-key, --enable-log-requests, --port"
        in result.output
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["--speculative-config", "{}"], "--speculative-config may change", id="known"),
        pytest.param(["--blok-size", "16"], "not an argument of vllm serve", id="unknown"),
        pytest.param(["--block-size"], "--block-size of vLLM needs a value", id="no value"),
        pytest.param(["--block-size", "big"], "write a number", id="no number"),
        pytest.param(["--kv-cache-memory-bytes", "1.5G"], "write a number", id="half a binary"),
        pytest.param([], "give --kv-cache-memory-bytes", id="no memory"),
        pytest.param(["16"], "does not belong to any argument", id="a stray word"),
        pytest.param(
            [*MEMORY, "-tp", "0"], "--tensor-parallel-size is 0; vLLM needs at least 1", id="none"
        ),
        pytest.param(
            [*MEMORY, "--kv-transfer-config", "{bad"], "is not JSON that vLLM accepts", id="no JSON"
        ),
        pytest.param([*MEMORY, "--kv-transfer-config", "[]"], "it must be an object", id="a list"),
        pytest.param(
            ["--kv-transfer-config", "{bad", "--kv-transfer-config.kv_role", "kv_both"],
            "is not JSON that vLLM accepts",
            id="a part of no JSON",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    words: list[str], said: str, model: Path
) -> None:
    """No argument that may change the plan is ignored."""
    result = run("--vllm", model, *words)

    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("tokens", [16, 48])
def test_blocks_that_attention_on_a_cpu_refuses_are_refused(tokens: int, model: Path) -> None:
    """With such blocks the engine would not start: on a CPU they are multiples of 32, and the refusal says which."""
    words = ("--vllm", model, *MEMORY, "--block-size")

    refused = run("--platform", "cpu", *words, tokens)

    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert f"--block-size is {tokens}; vLLM's attention there needs a multiple" in said
    assert f"such as {(tokens // 32 + 1) * 32}" in said
    assert run("--platform", "cpu", *words, 96).exit_code == 0
    assert run(*words, tokens).exit_code == 0


@pytest.mark.parametrize("depth", [2, 5000, "two"])
def test_window_of_all_positions_takes_the_block_more_of_a_window(
    depth: object, model: Path
) -> None:
    """A window in the config is planned as vLLM does, though it cuts nothing; a wrong depth is still refused."""
    words = {"model_type": "mistral", "sliding_window": 4096, "num_hidden_layers": depth}
    (model / "config.json").write_text(json.dumps(CONFIG | words))

    found = run("--vllm", model, *MEMORY, "--max-num-batched-tokens", 2048)

    if depth == 2:
        assert "sliding window of 4,096" in found.output
        assert f"take {4096 // 16 + 1} blocks" in found.output
    else:
        assert found.exit_code == 2
        assert "num_hidden_layers" in found.output


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("config.json", "{", id="a config"),
        pytest.param("config.json", "[]", id="a list"),
        pytest.param("tokenizer_config.json", "{", id="a tokenizer's config"),
        pytest.param("tokenizer_config.json", "[]", id="a tokenizer's list"),
    ],
)
def test_files_of_a_model_that_are_no_json_are_refused(name: str, text: str, model: Path) -> None:
    """A file that was cut short, or is another's, is named."""
    (model / name).write_text(text)

    found = run("--vllm", model, *MEMORY)

    assert found.exit_code == 2
    said = "".join(found.output.split())
    assert name in said
    assert "JSON" in said


def test_number_of_too_many_digits_is_refused(model: Path) -> None:
    """No number of vLLM's arguments has thousands of digits."""
    found = run("--vllm", model, *MEMORY, "--max-model-len", "9" * 5000)

    assert found.exit_code == 2
    assert "--max-model-len is" in found.output


@pytest.mark.parametrize(
    ("config", "tokenizer", "most"),
    [
        pytest.param({}, {}, 4096, id="positions"),
        pytest.param({}, {"model_max_length": 1024}, 1024, id="tokenizer"),
        pytest.param({}, {"model_max_length": None}, 4096, id="tokenizer without limit"),
        pytest.param({}, {"model_max_length": 1e30}, 4096, id="tokenizer beyond all limits"),
        pytest.param({"model_max_length": 8192}, {}, 8192, id="told besides"),
    ],
)
def test_requests_beyond_the_model_are_refused(
    config: dict[str, int], tokenizer: dict[str, float | None], most: int, model: Path
) -> None:
    """As in vLLM, a request beyond the model's reach is refused unless that is allowed; one within it is taken."""
    (model / "config.json").write_text(json.dumps(CONFIG | config))
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    words = ("plan", "--vllm", str(model), *MEMORY, "--max-model-len")

    refused = run(*words[1:], most + 1)
    told = CliRunner().invoke(
        app, [*words, str(most + 1)], env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    )

    assert refused.exit_code == 2
    assert f"by its config and tokenizer the model supports {most};" in " ".join(
        refused.output.split()
    )
    assert run(*words[1:], most).exit_code == 0
    assert told.exit_code == 0


def test_length_of_a_model_that_does_not_say_how_far_it_reaches_is_taken(model: Path) -> None:
    """A length is taken for a model without a known reach, since only vLLM knows whether it takes it."""
    config = {name: said for name, said in CONFIG.items() if name != "max_position_embeddings"}
    (model / "config.json").write_text(json.dumps(config))

    assert run("--vllm", model, *MEMORY, "--max-model-len", 9999).exit_code == 0


def test_defaults_of_a_gpu_are_asked_for_where_they_count(tmp_path: Path) -> None:
    """Windows keep the tokens of a step, whose default depends on the GPU, so the argument must be given."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **WINDOWS}))
    words = ("--vllm", tmp_path, "--kv-cache-memory-bytes", "64M")

    refused = run(*words)

    assert refused.exit_code == 2
    assert "give --max-num-batched-tokens" in " ".join(refused.output.split())
    assert run(*words, "--max-num-batched-tokens", 2048).exit_code == 0


def test_own_options_do_not_contradict_vllms(model: Path) -> None:
    """An option may not say what vLLM's arguments say already."""
    result = run("--tokens-per-block", 8, "--vllm", model, "--kv-cache-memory-bytes", "64M")

    assert result.exit_code == 2
    assert "--tokens-per-block cannot be used with --vllm" in " ".join(result.output.split())


@pytest.mark.parametrize("words", [["--json"], ["--platform=cpu"], ["--host-memory", "1GiB"]])
def test_own_option_behind_vllms_is_told_its_place(words: list[str], model: Path) -> None:
    """An option of ours behind --vllm is refused with its right place, and is taken there."""
    behind = run("--vllm", model, *MEMORY, *words)

    assert behind.exit_code == 2
    assert "put options of kvlease plan before --vllm" in " ".join(behind.output.split())
    assert run(*words, "--vllm", model, *MEMORY).exit_code == 0


@pytest.mark.parametrize("word", ["--tokens-per-block", "--vllm", "--jso"])
def test_word_that_has_no_place_before_vllms_is_told_none(word: str, model: Path) -> None:
    """A word that has no place before --vllm is not sent there, from one refusal to the next."""
    refused = run("--vllm", model, *MEMORY, word, 8)

    assert refused.exit_code == 2
    assert "before --vllm" not in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("written", "count"),
    [("2048", 2048), ("2k", 2000), ("2K", 2048), ("25.6k", 25_600), ("1G", 1 << 30)],
)
def test_numbers_have_vllms_endings(written: str, count: int) -> None:
    """As in vLLM, small letters are thousands and capitals are binary."""
    assert read_arguments(["m", "--max-model-len", written]).count("max-model-len") == count


@pytest.mark.parametrize("word", ["-O3", "-O=3", "-Odecode"])
def test_level_of_optimisation_may_stand_behind_its_letter(word: str) -> None:
    """A level of optimisation may follow its letter directly, as in vLLM."""
    assert read_arguments(["m", word]).ignored == ["optimization-level"]


def test_name_may_be_cut_short_where_it_is_the_only_one() -> None:
    """As in vLLM, the beginning of one argument's name alone means that argument."""
    given = read_arguments(["m", "--max-num-seq", "4", "--no-enable-pref", "--device-memory-u=0.5"])

    assert given.values == {"model": "m", "max-num-seqs": "4", "gpu-memory-utilization": "0.5"}
    assert given.switches == {"enable-prefix-caching": False}


@pytest.mark.parametrize(
    ("word", "own"),
    [
        pytest.param("--max-num", (), id="of several"),
        pytest.param("--device-memory", ["--device-memory"], id="ours"),
    ],
)
def test_name_that_may_mean_another_is_refused(word: str, own: list[str]) -> None:
    """The beginning of several names, and an option of ours, are taken for none of vLLM's."""
    with pytest.raises(InvalidError, match="is not an argument of vllm serve"):
        read_arguments(["m", word, "4"], own)


def test_parts_of_a_config_are_put_together() -> None:
    """A dotted argument is one part of a config in JSON."""
    given = read_arguments(["m", "--kv-transfer-config.kv_connector", "KVLeaseOwnedConnector"])

    assert json.loads(given.values["kv-transfer-config"]) == {
        "kv_connector": "KVLeaseOwnedConnector"
    }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--no-enable-chunked-prefill --max-num-batched-tokens 1024", "--max-model-len is 2048"),
        ("--no-enable-chunked-prefill --max-num-batched-tokens 2048", ""),
        ("--max-num-batched-tokens 63 --max-num-seqs 64", "--max-num-seqs is 64"),
        ("--max-num-batched-tokens 64 --max-num-seqs 64", ""),
        ("--max-num-batched-tokens 63", ""),
    ],
)
def test_steps_that_vllm_refuses_are_refused(model: Path, words: str, named: str) -> None:
    """A step must have room for a token of each request, and for a whole prompt if prompts are not split."""
    result = run("--vllm", model, *MEMORY, "--max-model-len", "2K", *words.split())

    assert result.exit_code == (2 if named else 0), result.output
    assert named in " ".join(result.output.split())


def test_model_that_vllm_never_computes_in_float16_is_planned_in_bfloat16(tmp_path: Path) -> None:
    """A plan in float16 is refused for such a model; where its config alone says so, vLLM takes bfloat16 instead."""
    config = {**CONFIG, **WINDOWS, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    refused = run("--vllm", tmp_path, *MEMORY, "--dtype", "half")
    made = plan("--vllm", tmp_path, *MEMORY, "--max-num-batched-tokens", "2K")

    assert refused.exit_code == 2
    told = " ".join(refused.output.split())
    assert "vLLM computes no gemma3_text model in float16; give bfloat16" in told
    assert {group["spec"]["dtype"] for group in made["groups"]} == {"bfloat16"}


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        pytest.param(RECURRENT, "bfloat16", id="the model's"),
        pytest.param({**RECURRENT, "mamba_ssm_dtype": "float32"}, "bfloat16", id="not its own"),
        pytest.param({**STATES_ALONE, "dtype": "float16"}, "float16", id="states alone"),
        pytest.param(NEMOTRON, "float32", id="always wide"),
        pytest.param({**NEMOTRON, "mamba_ssm_cache_dtype": "float16"}, "float16", id="its own"),
    ],
)
def test_states_have_the_element_type_that_vllm_gives_them(
    changes: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """A recurrent state has the model's element type, except in models whose configs vLLM asks for another."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))

    made = plan("--vllm", tmp_path, *MEMORY)

    states = [one["spec"] for one in made["ranks"][0]["layers"] if "dtypes" in one["spec"]]
    assert {tuple(state["dtypes"])[-1] for state in states} == {dtype}


def test_states_inside_of_a_larger_config_have_the_element_type_that_vllm_gives_them(
    tmp_path: Path,
) -> None:
    """The config of a model that reads images has its language model's words inside of it."""
    words = {"model_type": "llava", "dtype": "bfloat16", "text_config": {**CONFIG, **RECURRENT}}
    (tmp_path / "config.json").write_text(json.dumps(words))

    made = plan("--vllm", tmp_path, *MEMORY)

    states = [one["spec"] for one in made["ranks"][0]["layers"] if "dtypes" in one["spec"]]
    assert {tuple(state["dtypes"])[-1] for state in states} == {"bfloat16"}


@pytest.mark.parametrize(
    ("arguments", "tokens_per_block"),
    [
        pytest.param([], 4096, id="its default"),
        pytest.param(["--enable-prefix-caching"], 16, id="asked for"),
    ],
)
def test_states_alone_are_kept_at_block_ends_if_asked_for(
    arguments: list[str], tokens_per_block: int, tmp_path: Path
) -> None:
    """Unless it is told to, vLLM caches no prefixes of a model without attention, and keeps one state of a request."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **STATES_ALONE}))

    made = plan("--vllm", tmp_path, *MEMORY, *arguments)

    assert [group["tokens_per_block"] for group in made["groups"]] == [tokens_per_block]


def test_connector_of_unknown_groups_is_refused(model: Path) -> None:
    """Only vLLM can tell whether an unknown connector has one table for all layers, so it is refused."""
    words = ("--vllm", model, "--kv-cache-memory-bytes", "64M", "--kv-transfer-config")

    refused = run(*words, '{"kv_connector": "Another"}')

    assert refused.exit_code == 2
    assert run(*words, '{"kv_connector": "KVLeaseSharedConnector"}').exit_code == 0


@pytest.mark.parametrize(
    ("children", "exit_code"),
    [
        (["KVLeaseSharedConnector", "KVLeaseOffloadingConnector"], 0),
        (["KVLeaseSharedConnector", "Another"], 2),
        ([], 2),
        ("KVLeaseSharedConnector", 2),
        (["KVLeaseSharedConnector", None], 2),
    ],
    ids=["known", "one unknown", "none", "no list", "no object"],
)
def test_joined_connectors_serve_groups_if_each_does(
    model: Path, children: Any, exit_code: int
) -> None:
    """Joined connectors can serve several groups of layers if each of them can, so they need no further argument."""
    if isinstance(children, list):
        children = [name and {"kv_connector": name} for name in children]
    joined = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": children},
    }

    result = run("--vllm", model, *MEMORY, "--kv-transfer-config", json.dumps(joined))

    assert result.exit_code == exit_code, result.output
    assert exit_code == 0 or "MultiConnector" in result.output


@pytest.mark.parametrize(
    ("value", "num_groups"), [("", 2), ("1", 2), ("0", 1)], ids=["by default", "told", "not"]
)
def test_chunks_have_a_table_of_their_own_unless_the_variable_is_0(
    value: str, num_groups: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in vLLM, chunks are in one table with the other layers only if its variable says so."""
    (model / "config.json").write_text(json.dumps(CONFIG | CHUNKS))
    if value:
        monkeypatch.setenv(SPLIT_CHUNKS_VARIABLE, value)

    made = plan("--vllm", model, *MEMORY, "--max-num-batched-tokens", 512)

    assert len(made["groups"]) == num_groups


def test_missing_model_is_refused() -> None:
    """Without a model there is no plan."""
    with pytest.raises(InvalidError, match="needs a value"):
        read_arguments(["--model"])

    assert run("--vllm").exit_code == 2


@pytest.mark.parametrize(
    ("words", "remedies"),
    [
        pytest.param(
            ("--kv-cache-memory-bytes", "4M", "--max-model-len", "4096"),
            ["--kv-cache-memory-bytes 8421376  (8.03 MiB)", "--max-model-len 2032"],
            id="too long",
        ),
        pytest.param(
            ("--kv-cache-memory-bytes", "64M", "-tp", 3),
            ["--tensor-parallel-size 4", "--tensor-parallel-size 2"],
            id="heads that cannot be shared",
        ),
        pytest.param(
            ("--num-gpu-blocks-override", 9), ["--num-gpu-blocks-override 257"], id="few blocks"
        ),
    ],
)
def test_refusal_says_what_would_work_in_words_of_vllm(
    words: tuple[object, ...], remedies: list[str], model: Path
) -> None:
    """The advised arguments can be written behind --vllm, and then there is a plan."""
    refused = run("--vllm", model, *words)
    advice = [
        line.removeprefix("  - ") for line in refused.stderr.splitlines() if line.startswith("  - ")
    ]

    assert refused.exit_code == 2
    assert advice[: len(remedies)] == remedies
    for one in advice:
        option, value = one.split()[:2]
        assert run("--vllm", model, *words, option, value).exit_code == 0


@pytest.mark.parametrize(
    ("child", "policy", "is_told"),
    [
        pytest.param("KVLeaseOffloadingConnector", {}, True, id="vLLM's default"),
        pytest.param(
            "KVLeaseOffloadingConnector", {"kv_load_failure_policy": "recompute"}, False, id="right"
        ),
        pytest.param("KVLeaseOwnedConnector", {}, False, id="loads nothing"),
    ],
)
def test_policy_with_which_the_engine_would_not_start_is_told(
    child: str, policy: dict[str, str], is_told: bool, model: Path
) -> None:
    """The plan is printed, and what to change beside it: the policy of MultiConnector, whatever its child says."""
    own = {"kv_connector": child, "kv_load_failure_policy": "recompute"}
    joined = {"kv_connector_extra_config": {"connectors": [own]}}
    config = json.dumps({"kv_connector": "MultiConnector", **joined, **policy})

    result = run("--json", "--vllm", model, *MEMORY, "--kv-transfer-config", config)

    assert result.exit_code == 0
    assert "plan" in json.loads(result.stdout)
    assert ("set it to recompute there" in " ".join(result.stderr.split())) is is_told


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize(
    ("role", "extra", "words", "told"),
    [
        pytest.param("kv_both", {"pool_bytes": 2**30}, (), None, id="right"),
        pytest.param("kv_producer", {}, (), "kv_role is kv_producer", id="role"),
        pytest.param("kv_both", {"pool_byte": 1}, (), "did you mean pool_bytes?", id="no setting"),
        pytest.param("kv_both", {"deadline_ms": -1}, (), "deadline_ms: Input", id="no value"),
        pytest.param(
            "kv_both", {}, ("--kv-offloading-size", 4), "nothing reaches kvlease", id="replaced"
        ),
    ],
)
def test_settings_with_which_a_connector_would_not_work_are_told(
    is_joined: bool,
    role: str,
    extra: dict[str, object],
    words: tuple[object, ...],
    told: str | None,
    model: Path,
) -> None:
    """The plan is printed, and beside it what the connector would refuse, or that vLLM would not load it."""
    config: dict[str, object] = {
        "kv_connector": "KVLeaseOwnedConnector",
        "kv_connector_extra_config": extra,
    }
    if is_joined:
        config = {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": [config]},
        }

    result = run(
        *("--json", "--vllm", model, *MEMORY, *words),
        *("--kv-transfer-config", json.dumps(config | {"kv_role": role})),
    )

    said = " ".join(result.stderr.split())
    assert result.exit_code == 0
    assert "plan" in json.loads(result.stdout)
    assert told in said if told else not said


def test_advice_that_vllm_cannot_be_given_is_left_out() -> None:
    """Settings that are vLLM's own, such as null blocks, are not advised; tiers stand before --vllm, unchanged."""
    assert not VLLM.has("null_blocks=1")
    assert not VLLM.has("tensor_ranks=2 null_blocks=1")
    assert VLLM.has("tensor_ranks=2 host_bytes=1024")
    assert with_options("state_mode=align would", VLLM) == "--mamba-cache-mode align would"
    assert as_options("prefix_caching=false", VLLM) == "--no-enable-prefix-caching"


def test_every_setting_is_an_argument_that_a_plan_depends_on() -> None:
    """Each setting that is advised behind --vllm is read there."""
    own = {"--blocks-per-slot", "--disk", "--host-memory", "--layout", "--remote"}
    said = {*VLLM.options.values(), *(yes for yes, _ in VLLM.switches.values())} - own

    assert {one.removeprefix("--") for one in said} <= VALUES | SWITCHES
