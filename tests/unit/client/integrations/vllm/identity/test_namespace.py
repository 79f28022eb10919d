"""Laws of an engine's identity: equal in all of its processes, and different where any bytes would differ."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvlease.integrations.vllm.identity.namespace import FIELDS, Identity, magazine_name, rank_mark

CACHE_NAME_CHARACTERS_MAX = 63
DIGEST_CHARACTERS_MAX = 256


LONG_ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 1024}


def config_of(commit: str | None = None, **fields: Any) -> SimpleNamespace:
    """Return a model's configuration in the form of Transformers."""
    return SimpleNamespace(
        _commit_hash=commit,
        to_dict=lambda: {"transformers_version": os.urandom(4).hex(), **fields},
    )


def config(**changes: Any) -> SimpleNamespace:
    """Return the parts of vLLM's configuration that an identity reads; a change is named part__field."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "org/Tiny-Model_1.5B", "revision": None, "dtype": "torch.bfloat16", "seed": 0,
            "quantization": None, "hf_overrides": {}, "hf_config": config_of(),
            "hf_text_config": SimpleNamespace(rope_parameters=LONG_ROPE), "max_model_len": 512,
        },
        "cache_config": {
            "prefix_caching_hash_algo": "sha256", "cache_dtype": "auto", "kv_cache_dtype_skip_layers": [],
            "block_size": 16,
        },
        "parallel_config": {
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1, "cp_kv_cache_interleave_size": 1,
        },
        "load_config": {"load_format": "auto"},
        "device_config": {"device_type": "cpu"},
        "kv_transfer_config": {"engine_id": "engine"},
    }  # fmt: skip
    whole: dict[str, Any] = {"speculative_config": None, "instance_id": "one"}
    for path, value in changes.items():
        part, _, name = path.partition("__")
        if name:
            parts[part][name] = value
        else:
            whole[part] = value
    return SimpleNamespace(
        **whole, **{name: SimpleNamespace(**fields) for name, fields in parts.items()}
    )


def layout(**changes: Any) -> SimpleNamespace:
    """Return the parts of vLLM's layout that an identity reads."""
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=changes.pop("block_size", 32)))
    return SimpleNamespace(
        **{"kv_cache_groups": [group], "kv_cache_layout": "LBHNC", "hash_block_size": 32, **changes}
    )


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        pytest.param({"model_config__model": "org/other"}, "model", id="model"),
        pytest.param({"model_config__revision": "v2"}, "revision", id="revision"),
        pytest.param(
            {"model_config__model_class_overrides": {"LlamaForCausalLM": "own:Llama"}},
            "code",
            id="code of the model",
        ),
        pytest.param(
            {"kernel_config": SimpleNamespace(moe_backend="marlin")}, "arithmetic", id="kernels"
        ),
        pytest.param(
            {"load_config__ignore_patterns": ["part-2*"]}, "load_format", id="files left out"
        ),
        pytest.param(
            {"model_config__quantization_config": {"linear": "fp8_per_block"}},
            "quantization",
            id="settings of quantisation",
        ),
        pytest.param(
            {"lora_config": SimpleNamespace(lora_dtype="float32", target_modules=["o_proj"])},
            "adapters",
            id="what adapters change",
        ),
        pytest.param(
            {"attention_config": SimpleNamespace(use_non_causal=True)}, "layout", id="attention"
        ),
        pytest.param({"model_config__dtype": "torch.float32"}, "dtype", id="dtype"),
        pytest.param({"model_config__quantization": "fp8"}, "quantization", id="quantization"),
        pytest.param({"model_config__hf_overrides": {"rope": 2}}, "overrides", id="overrides"),
        pytest.param(
            {"model_config__hf_config": config_of(rope_theta=2.0)}, "config", id="config elsewhere"
        ),
        pytest.param(
            {
                "model_config__hf_text_config": SimpleNamespace(rope_parameters=LONG_ROPE),
                "model_config__max_model_len": 2048,
            },
            "config",
            id="factors of a long rope",
        ),
        pytest.param({"load_config__load_format": "dummy"}, "load_format", id="dummy weights"),
        pytest.param({"load_config__load_format": "pt"}, "load_format", id="other files"),
        pytest.param(
            {"load_config__model_loader_extra_config": {"pattern": "b-*"}},
            "load_format",
            id="which files",
        ),
        pytest.param(
            {
                "model_config__multimodal_config": SimpleNamespace(
                    mm_processor_kwargs={"do_normalize": False}
                )
            },
            "overrides",
            id="what is made of images",
        ),
        pytest.param(
            {"cache_config__mamba_cache_dtype": "float16"}, "kv_dtype", id="dtype of states"
        ),
        pytest.param(
            {"cache_config__mamba_ssm_cache_dtype": "float16"}, "kv_dtype", id="dtype of SSM states"
        ),
        pytest.param(
            {"attention_config": SimpleNamespace(backend="FLASHINFER")}, "layout", id="backend"
        ),
        pytest.param({"cache_config__cache_dtype": "fp8"}, "kv_dtype", id="kv dtype"),
        pytest.param(
            {"cache_config__kv_cache_dtype_skip_layers": ["0"]}, "kv_dtype", id="layers in full"
        ),
        pytest.param(
            {"cache_config__prefix_caching_hash_algo": "sha256_cbor"}, "hash_algorithm", id="hash"
        ),
        pytest.param({"parallel_config__tensor_parallel_size": 2}, "ranks", id="tensor ranks"),
        pytest.param({"parallel_config__pipeline_parallel_size": 2}, "ranks", id="stages"),
        pytest.param(
            {"parallel_config__decode_context_parallel_size": 2}, "ranks", id="context ranks"
        ),
        pytest.param({"device_config__device_type": "cuda"}, "device", id="device"),
        pytest.param(
            {"speculative_config": SimpleNamespace(method="eagle", model="d")}, "draft", id="draft"
        ),
    ],
)
def test_difference_of_configuration_is_named(changes: dict[str, Any], field: str) -> None:
    """Any change that would make other bytes makes another digest, and the field is named from the text alone."""
    one, other = Identity.of(config(), layout()), Identity.of(config(**changes), layout())

    differing = one.differing(other.model_digest)

    assert one.digest != other.digest
    assert [text.partition(" ")[0] for text in differing] == [field]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        pytest.param({"block_size": 16}, "block_tokens", id="block"),
        pytest.param({"kv_cache_layout": "BLHNC"}, "layout", id="layout"),
        pytest.param({"hash_block_size": 16}, "hash_tokens", id="hash unit"),
    ],
)
def test_difference_of_layout_is_named(changes: dict[str, Any], field: str) -> None:
    """A change in what vLLM decides about its cache makes another digest, too."""
    one, other = Identity.of(config(), layout()), Identity.of(config(), layout(**changes))

    assert [text.partition(" ")[0] for text in one.differing(other.model_digest)] == [field]


def test_commit_says_what_the_configuration_is() -> None:
    """Two commits differ; at one commit, what a worker changes in its configuration to build the model does not."""
    loaded, built, other = (
        Identity.of(config(model_config__hf_config=config_of(commit, **fields)), layout())
        for commit, fields in (("a", {}), ("a", {"attn_temperature_tuning": True}), ("b", {}))
    )

    assert loaded == built
    assert [text.partition(" ")[0] for text in loaded.differing(other.model_digest)] == ["revision"]


def test_commit_of_another_configuration_is_not_that_of_the_weights() -> None:
    """A configuration from elsewhere has a commit of its own, beside which the revision of the weights counts."""
    found = [
        Identity.of(
            config(
                model_config__hf_config=config_of("a"),
                model_config__hf_config_path=path,
                model_config__revision=revision,
            ),
            layout(),
        )
        for path, revision in (
            (None, "v1"),
            (None, "v2"),
            ("org/config", "v1"),
            ("org/config", "v2"),
        )
    ]

    assert found[0] == found[1]
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("said", "long", "scales"),
    [({}, False, False), ({}, True, True), ({"tuning": True}, False, True)],
)
def test_what_scales_the_queries_of_llama_4_is_part_of_the_identity(
    said: dict[str, bool], long: bool, scales: bool
) -> None:
    """The longest request decides it, unless the generation configuration says it."""
    generation = {f"attn_temperature_{name}": value for name, value in said.items()}
    changes = {
        "model_config__architectures": ["Llama4ForConditionalGeneration"],
        "model_config__override_generation_config": generation,
        "model_config__max_model_len": 65_536 if long else 8_192,
    }
    built = config(**changes)
    built.model_config.try_get_generation_config = dict

    value = Identity.of(built, layout()).values[FIELDS.index("config")]

    assert value.endswith(f"attn_temperature_tuning {scales}")


def test_name_that_a_worker_gives_to_latent_vectors_counts() -> None:
    """A worker changes the type in its configuration as it builds the model; vLLM tells all processes of it."""
    spec = SimpleNamespace(block_size=32, cache_dtype_str="fp8_ds_mla")
    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32, kv_cache_specs={"0": spec}))
    ]

    found = {
        Identity.of(config(cache_config__cache_dtype=name), layout(kv_cache_groups=groups))
        for name in ("auto", "fp8", "fp8_ds_mla")
    }

    assert len(found) == 1


def test_other_scales_at_one_path_are_noticed(tmp_path: Path) -> None:
    """The file of an encoder's scales counts whole; if it cannot be read, the refusal says so."""
    path = tmp_path / "scales.json"
    media = SimpleNamespace(mm_encoder_fp8_scale_path=str(path))
    refused = Identity.of(config(model_config__multimodal_config=media), layout())
    found = set()
    for text in ("{}", '{"0": 1}'):
        path.write_text(text)
        found.add(Identity.of(config(model_config__multimodal_config=media), layout()))

    assert "scales.json" in refused.refusal
    assert len(found) == 2


def test_scales_count_neither_by_path_nor_beside_named_weights(tmp_path: Path) -> None:
    """Equal scales at two paths are the same; with `weights`, they are those of the weights and are not read."""
    paths = [tmp_path / "one.json", tmp_path / "other.json"]
    for path in paths:
        path.write_text("{}")
    media = [SimpleNamespace(mm_encoder_fp8_scale_path=str(path)) for path in (*paths, "absent")]
    media.append(SimpleNamespace(mm_encoder_fp8_scale_path=None))
    engines = [config(model_config__multimodal_config=one) for one in media]

    one, other, _, none = (Identity.of(engine, layout()) for engine in engines)
    named = [Identity.of(engine, layout(), weights="v1") for engine in engines]

    assert (one == other, one == none) == (True, False)
    assert named[0] == named[1] == named[2] != named[3]


def test_seed_of_hashes_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines whose hashes begin with another seed share nothing."""
    one = Identity.of(config(), layout())
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    other = Identity.of(config(), layout())

    assert [text.partition(" ")[0] for text in one.differing(other.model_digest)] == ["hash_seed"]


def test_random_seed_is_refused_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes that no other process can make again are worth no cache; a seed that is set is taken."""
    changed = config(cache_config__prefix_caching_hash_algo="xxhash")

    refused = Identity.of(changed, layout())
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    accepted = Identity.of(changed, layout())

    assert "PYTHONHASHSEED" in refused.refusal
    assert accepted.refusal == ""


def test_what_does_not_change_bytes_changes_nothing() -> None:
    """Two lives of an engine, and all replicas, have one identity."""
    one = Identity.of(config(), layout())
    other = Identity.of(config(instance_id="two", kv_transfer_config__engine_id="x"), layout())

    assert one == other
    assert one.differing(other.model_digest) == []


def test_modes_that_deal_with_a_pool_otherwise_are_told_apart() -> None:
    """Engines of different modes share no cache and no key; the refusal names the field that has the mode."""
    plain = Identity(tuple(FIELDS))
    owned, shared = plain.in_mode("owned"), plain.in_mode("shared")

    assert owned == plain.in_mode("owned")
    assert len({plain.digest, owned.digest, shared.digest}) == 3
    assert shared.differing(owned.model_digest) == ["format (here format, shared)"]


def test_foreign_digest_is_told_apart() -> None:
    """The digest of a cache that no vLLM registered has another form, and is told apart by it."""
    identity = Identity.of(config(), layout())

    assert "form" in identity.differing("sha256:abc")[0]
    assert "form" in identity.differing("")[0]
    assert "form" in identity.differing(identity.model_digest[:-1])[0]


def weights_differ(one: Identity, other: Identity) -> bool:
    """Tell whether two identities differ, and in nothing but their weights."""
    names = [text.partition(" ")[0] for text in one.differing(other.model_digest)]
    assert names in ([], ["weights"])
    return bool(names)


def test_weights_of_a_directory_are_looked_at(tmp_path: Path) -> None:
    """Other weights at one path make another identity; a link to a file named by its content counts by that name."""
    (tmp_path / "config.json").write_text("{}")
    blob = tmp_path / ("0123456789abcdef" * 4)
    blob.write_bytes(b"w")
    (tmp_path / "model.safetensors").symlink_to(blob)
    changed = config(model_config__model=str(tmp_path))

    first = Identity.of(changed, layout())
    os.utime(blob, (1, 1))
    (tmp_path / "README.md").write_text("no weights")
    touched = Identity.of(changed, layout())
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"v")
    replaced = Identity.of(changed, layout())
    said = Identity.of(changed, layout(), weights="step 7")

    assert first == touched
    assert weights_differ(first, replaced)
    assert said.values[FIELDS.index("weights")] == "step 7"


def test_link_to_other_weights_of_the_same_name_is_noticed(tmp_path: Path) -> None:
    """Checkpoints of one model differ neither in name nor in size, and a copy may have kept the time."""
    model = tmp_path / "model"
    model.mkdir()
    link, found = model / "model.safetensors", []
    for step in (1, 2):
        checkpoint = tmp_path / f"step-{step}"
        checkpoint.mkdir()
        target = checkpoint / "model.safetensors"
        target.write_bytes(bytes([step]) * 100_000)
        os.utime(target, (1, 1))
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        found.append(Identity.of(config(model_config__model=str(model)), layout()))

    assert weights_differ(*found)


@pytest.mark.parametrize("at", [0, 50_000, 99_999])
def test_weights_that_were_written_anew_in_place_are_noticed(tmp_path: Path, at: int) -> None:
    """A file that is the model itself tells by its time, and by samples of its bytes."""
    model = tmp_path / "model.gguf"
    told = bytearray(100_000)
    changed = config(model_config__model=str(model))
    model.write_bytes(told)
    first = Identity.of(changed, layout())

    told[at] = 1
    model.write_bytes(told)
    os.utime(model, ns=(5, 5))

    assert weights_differ(first, Identity.of(changed, layout()))


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("processor_config.json", True),
        ("preprocessor_config.json", True),
        ("video_preprocessor_config.json", True),
        ("params.json", True),
        ("hf_quant_config.json", True),
        ("modeling_own.py", True),
        ("generation_config.json", False),
        ("README.md", False),
    ],
)
def test_files_that_say_what_is_computed_count_whole(
    tmp_path: Path, name: str, counts: bool
) -> None:
    """Whatever says what becomes of an image, or is the model's own code, makes another identity when it changes."""
    (tmp_path / "config.json").write_text("{}")
    changed = config(model_config__model=str(tmp_path))
    found = []
    for text in ("mean 0.4", "mean 0.5"):
        (tmp_path / name).write_text(text)
        found.append(Identity.of(changed, layout()))

    assert weights_differ(*found) is counts


@pytest.mark.parametrize("is_draft", [False, True])
def test_weights_that_are_streamed_are_refused_unless_they_are_said(is_draft: bool) -> None:
    """An address says nothing of what is there, be it the model's or its draft's; it is told with what to set."""
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(model_weights="s3://bucket/model"))
    changed = config(
        **(
            {"speculative_config": draft}
            if is_draft
            else {"model_config__model_weights": "s3://bucket/model"}
        )
    )

    assert "s3://bucket/model" in Identity.of(changed, layout()).refusal
    assert Identity.of(changed, layout(), weights="step 7").refusal == ""


def test_weights_that_cannot_be_looked_at_are_refused() -> None:
    """A path that the system refuses raises nothing; a setting can say what the weights are instead."""
    changed = config(model_config__model="x" * 300)

    assert "set `weights`" in Identity.of(changed, layout()).refusal
    assert Identity.of(changed, layout(), weights="step 7").refusal == ""


def test_names_fit_where_they_go() -> None:
    """The text fits into a plan and the names fit the daemon's rules, whatever the model is called."""
    for model in ("org/Tiny-Model_1.5B", "-", "x" * 200, "/models/ÄÖ"):
        identity = Identity.of(config(model_config__model=model), layout())
        name = identity.cache_name("offload")

        assert len(identity.model_digest) <= DIGEST_CHARACTERS_MAX
        assert len(name) <= CACHE_NAME_CHARACTERS_MAX
        assert all(letter in "abcdefghijklmnopqrstuvwxyz0123456789-" for letter in name)
        assert name.startswith("vllm-offload-")


def test_magazine_is_one_life_of_one_engine_in_one_mode() -> None:
    """The processes of an engine give the same name; another engine, life or mode gives another one."""
    names = [
        magazine_name(config(), "owned"),
        magazine_name(config(), "shared"),
        magazine_name(config(instance_id="two"), "owned"),
        magazine_name(config(kv_transfer_config__engine_id="x"), "owned"),
    ]

    assert magazine_name(config(), "owned") == names[0]
    assert len(set(names)) == 4


def test_mark_tells_data_parallel_ranks_apart() -> None:
    """The first rank has none, as an engine without others; each of the others has one of its own."""
    ranks = [config(parallel_config__data_parallel_index=index) for index in range(3)]

    assert [rank_mark(one) for one in (config(), *ranks)] == ["", "", "-dp1", "-dp2"]


def test_identity_is_the_same_in_every_process() -> None:
    """Neither Transformers' release, nor an address in memory, nor a length that moves no byte is part of it."""
    fields = {"rope_theta": 1.0, "quantizer": object()}
    changes = {"model_config__hf_config": config_of(**fields)}

    one = Identity.of(config(**changes), layout())
    two = Identity.of(
        config(
            model_config__hf_config=config_of(rope_theta=1.0, quantizer=object()),
            model_config__max_model_len=1024,
        ),
        layout(),
    )

    assert one == two
    assert not one.has_adapters
    assert Identity.of(config(lora_config=SimpleNamespace()), layout()).has_adapters
