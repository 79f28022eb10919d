"""Prove that a cache serves the model that it was registered for, and refuses all that it would serve wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvlease import Client  # noqa: E402
from kvlease.errors import InvalidError, WrongStateError  # noqa: E402
from kvlease.integrations.transformers import (  # noqa: E402
    LeasedCache,
    generate,
    model_digest,
)
from kvlease.items import ContextItem  # noqa: E402
from tests.integrations.transformers.leasing import (  # noqa: E402
    attached,
    plain,
    prompt,
    taking,
    unnamed,
)

if TYPE_CHECKING:
    from transformers import (
        BartForConditionalGeneration,
        LlamaForCausalLM,
        LlavaForConditionalGeneration,
    )

    from kvlease import Worker

pytestmark = pytest.mark.acceptance


@pytest.mark.parametrize(
    ("change", "dtype", "resource"),
    [
        pytest.param({"num_hidden_layers": 2}, "float32", "layers", id="layers"),
        pytest.param({"num_key_value_heads": 4}, "float32", "heads", id="heads"),
        pytest.param({}, "bfloat16", "dtype", id="dtype"),
    ],
)
def test_model_of_another_shape_is_refused(
    client: Client,
    model: LlamaForCausalLM,
    change: dict[str, int],
    dtype: str,
    resource: str,
) -> None:
    """A model of another shape than the cache's is refused by what differs, and does not run without the cache."""
    config = transformers.LlamaConfig(**(model.config.to_dict() | change))
    other = transformers.LlamaForCausalLM(config).eval().to(getattr(torch, dtype))

    with attached(client, unnamed(model)) as worker, pytest.raises(InvalidError) as caught:
        generate(other, worker, prompt(20), max_new_tokens=3, request_id="other")

    assert caught.value.resource == resource


def test_model_of_other_weights_is_refused(worker: Worker, model: LlamaForCausalLM) -> None:
    """Two models of one config never share a prefix if the cache names its model."""
    other = transformers.LlamaForCausalLM(model.config).eval()

    with pytest.raises(InvalidError) as caught:
        generate(other, worker, prompt(20), max_new_tokens=3, request_id="other")
    with pytest.raises(InvalidError):
        LeasedCache.reserve(worker, prompt(20), request_id="other", model=other)

    assert (caught.value.resource, caught.value.rule) == ("model_digest", "other_model")


def test_cache_without_a_model_is_warned_of_once(
    client: Client, model: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache that names no model serves any of its shape, and the log says so once."""
    # No other test triggers the warning for this layout.
    with attached(client, replace(unnamed(model), tokens_per_block=4)) as worker:
        for request_id in ("one", "two"):
            generate(model, worker, prompt(20), max_new_tokens=3, request_id=request_id)

    assert [getattr(record, "action", "") for record in caplog.records] == ["model_unnamed"]


def test_digest_of_a_model_follows_its_weights(model: LlamaForCausalLM) -> None:
    """Equal models have equal digests; one whose weights change has another."""
    twin = transformers.LlamaForCausalLM(model.config).eval()
    before = model_digest(twin)
    twin.load_state_dict(model.state_dict())
    loaded = model_digest(twin)
    with torch.no_grad():
        twin.lm_head.weight.mul_(1.5)

    assert before != loaded == model_digest(model)
    assert model_digest(twin) not in (before, loaded)


def test_commit_refuses_layers_that_were_not_written(
    client: Client, model: LlamaForCausalLM
) -> None:
    """A commit of blocks in which a smaller model left layers unwritten is refused."""
    config = transformers.LlamaConfig(**(model.config.to_dict() | {"num_hidden_layers": 2}))
    other = transformers.LlamaForCausalLM(config).eval()
    token_ids = prompt(40)
    with (
        attached(client, unnamed(model)) as worker,
        LeasedCache.reserve(worker, token_ids, request_id="layers") as cache,
    ):
        other(torch.tensor([token_ids]), **taking(other, cache))

        with pytest.raises(WrongStateError) as caught:
            cache.commit(token_ids)

    assert (caught.value.need, caught.value.available) == (3, 2)


def test_cache_refuses_a_batch(worker: Worker, model: LlamaForCausalLM) -> None:
    """A lease holds one sequence, so a batch of two is refused before anything is written."""
    token_ids = prompt(20)
    with LeasedCache.reserve(worker, token_ids, request_id="batch") as cache:
        with pytest.raises(InvalidError):
            model(torch.tensor([token_ids, token_ids]), **taking(model, cache))

        assert cache.get_seq_length() == 0


@pytest.fixture(scope="module")
def translator() -> BartForConditionalGeneration:
    """Build a small model whose decoder reads an encoder's output."""
    torch.manual_seed(0)
    config = transformers.BartConfig(
        dtype="float32",
        vocab_size=512,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=128,
    )
    return transformers.BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("is_given", [True, False], ids=["model given", "model unknown"])
def test_model_with_an_encoder_is_refused_as_that(
    client: Client, translator: BartForConditionalGeneration, is_given: bool
) -> None:
    """No other registration would help, so none is advised."""
    model = translator if is_given else None
    with attached(client, unnamed(translator)) as worker, pytest.raises(InvalidError) as caught:
        LeasedCache.reserve(worker, prompt(20), request_id="encoder", model=model)

    assert caught.value.rule == "kind_not_supported"
    assert "encoder" in caught.value.message
    assert "one_group" not in caught.value.message
    assert "register" not in caught.value.message


LONG_ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [float(1 + place) for place in range(8)],
    },
}


@pytest.mark.parametrize("kind", LONG_ROPES)
def test_keys_that_depend_on_the_length_of_a_request_are_not_shared(
    client: Client, model: LlamaForCausalLM, kind: str
) -> None:
    """A model whose K depend on a request's length is refused without a bound on it; with one, hits are right."""
    changes = {"rope_parameters": LONG_ROPES[kind], "max_position_embeddings": 64}
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**(model.config.to_dict() | changes))
    ).eval()
    inputs = replace(unnamed(other), model_digest=model_digest(other), longest_request_tokens=256)

    with (
        attached(client, inputs) as worker,
        pytest.raises(
            InvalidError, match="register the cache with longest_request_tokens=64"
        ) as caught,
    ):
        LeasedCache.reserve(worker, prompt(40), request_id="long", model=other)
    assert caught.value.limit == 64
    with attached(client, replace(inputs, longest_request_tokens=64)) as worker:
        for request_id in ("miss", "hit"):
            made = generate(other, worker, prompt(40), max_new_tokens=20, request_id=request_id)
            assert list(made.tokens) == plain(other, prompt(40))[:20]


def test_generation_config_that_is_not_applied_is_told_once(
    worker: Worker, model: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    """A generation config with a repetition penalty, which is not applied here, is warned of once."""
    model.generation_config.repetition_penalty = 1.8
    try:
        for request_id in ("one", "two"):
            generate(model, worker, prompt(20), max_new_tokens=3, request_id=request_id)
    finally:
        model.generation_config.repetition_penalty = None

    said = [line.message for line in caplog.records if "repetition_penalty" in line.message]
    assert len(said) == 1


IMAGE_TOKEN, IMAGE_TOKENS = 512, 16


@pytest.fixture(scope="module")
def seeing() -> LlavaForConditionalGeneration:
    """Build a small model that looks at images."""
    torch.manual_seed(0)
    text = transformers.LlamaConfig(
        vocab_size=513,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=7,
        projection_dim=32,
    )
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN, dtype="float32"
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.model.multi_modal_projector.parameters():
            parameter.mul_(20)
    model.generation_config.eos_token_id = None
    return model


def test_images_are_told_apart_by_items(
    client: Client, seeing: LlavaForConditionalGeneration
) -> None:
    """Equal tokens behind another image are no hit, no hit ends amid an image, and an undeclared image is refused."""
    before, behind = prompt(20), prompt(60, seed=1)
    token_ids = [*before, *[IMAGE_TOKEN] * IMAGE_TOKENS, *behind]
    images = [torch.full((1, 3, 28, 28), shade) for shade in (-1.0, 1.0)]
    inputs = replace(unnamed(seeing), model_digest=model_digest(seeing))
    options = {"max_new_tokens": 20, "do_sample": False}
    said: list[list[int]] = []
    hits: list[int] = []

    def see(worker: Worker, image: int, tokens: list[int]) -> None:
        item = ContextItem(digest=f"image {image}", first_token=20, num_tokens=IMAGE_TOKENS)
        with LeasedCache.reserve(
            worker, tokens, request_id="r", model=seeing, items=[item]
        ) as cache:
            hits.append(cache.get_seq_length())
            pixels = {} if hits[-1] > 20 else {"pixel_values": images[image]}
            made = seeing.generate(
                torch.tensor([tokens]), **taking(seeing, cache), **pixels, **options
            )
            cache.commit(made[0].tolist())
            said.append(made[0].tolist())

    with attached(client, inputs) as worker:
        with pytest.raises(InvalidError, match="Token 20 of the prompt stands for an image"):
            LeasedCache.reserve(worker, token_ids, request_id="r", model=seeing)
        for image in (0, 1, 0):
            see(worker, image, token_ids)
        see(worker, 0, token_ids[:37] + prompt(30, seed=2))

    wanted = [
        seeing.generate(torch.tensor([token_ids]), pixel_values=images[image], **options)[0]
        for image in (0, 1, 0)
    ]
    assert said[:3] == [tokens.tolist() for tokens in wanted]
    assert said[0] != said[1]
    assert hits == [0, 16, 80, 16]
