"""Laws of JSON bodies: JSON can say what the protocol can say, and anything else is refused."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from pydantic import BaseModel, ValidationError

from kvlease.plan import CachePlan, PlanInputs
from kvlease.spec import MLA, FullAttention
from kvlease.transports import _rest
from kvlease.units import RANKS_MAX
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire import bodies, plans
from tests.unit.client.test_plan import INPUTS, PLANS

LAYER = {"name": "0", "kind": "full_attention", "num_kv_heads": 2, "head_size": 64, "dtype": "float16"}  # fmt: skip


def read(inputs: dict[str, Any]) -> PlanInputs:
    """Return the inputs in a body."""
    body = bodies.PlanBody.model_validate_json(json.dumps({"inputs": inputs}))
    return PlanInputs.from_proto(pb.PlanRequest(**body.fields()).inputs)


@settings(max_examples=30)
@given(INPUTS)
def test_inputs_survive_json(inputs: PlanInputs) -> None:
    """Inputs that the library sends as JSON are read as they were, with every field."""
    assert read(_rest.to_json(inputs.to_proto())) == inputs


@settings(max_examples=30)
@given(PLANS)
def test_plans_survive_json(plan: CachePlan) -> None:
    """A plan that comes as JSON is read as it was, with its lists of names and numbers."""
    message = pb.CachePlan()

    _rest.fill(message, json.loads(json.dumps(_rest.to_json(plan.to_proto()))))

    assert CachePlan.from_proto(message) == plan


@pytest.mark.parametrize(
    "name",
    ["Shape", "LayerSpec", "RankInputs", "ParallelInputs", "EngineInputs", "BackendInputs", "PlanInputs"],
)  # fmt: skip
def test_bodies_have_the_fields_of_their_messages(name: str) -> None:
    """A field has the same name in JSON and on the other wires."""
    fields = getattr(plans, name).model_fields.items()

    assert {field.alias or named for named, field in fields} == set(
        getattr(pb, name).DESCRIPTOR.fields_by_name
    )


@pytest.mark.parametrize(
    ("body", "name", "in_path"),
    [
        pytest.param(bodies.AttachBody, "AttachRequest", {"cache"}, id="attach"),
        pytest.param(bodies.ReserveBody, "ReserveRequest", set(), id="reserve"),
        pytest.param(bodies.ExtendBody, "ExtendRequest", {"lease_id"}, id="extend"),
        pytest.param(bodies.CommitBody, "CommitRequest", {"lease_id"}, id="commit"),
        pytest.param(bodies.ForkBody, "ForkRequest", {"lease_id"}, id="fork"),
        pytest.param(bodies.TrimBody, "TrimRequest", {"lease_id"}, id="trim"),
        pytest.param(bodies.StepBody, "StepRequest", set(), id="step"),
        pytest.param(bodies.Holding, "Holding", set(), id="holding"),
    ],
)
def test_bodies_say_what_their_path_does_not(
    body: type[BaseModel], name: str, in_path: set[str]
) -> None:
    """A body has exactly those fields of its message that the path does not say."""
    assert set(body.model_fields) | in_path == set(getattr(pb, name).DESCRIPTOR.fields_by_name)


def test_layers_of_earlier_callers_mean_the_same() -> None:
    """A layer with only the fields of earlier versions is full attention with V heads as large as K heads."""
    inputs = read({"layers": [LAYER], "tokens_per_block": 16, "device_blocks": 8})

    (layer,) = inputs.layers
    assert isinstance(layer, FullAttention)
    assert (layer.value_head_size, layer.bytes_per_state) == (64, 256)
    assert inputs == PlanInputs(
        layers=(FullAttention(name="0", num_kv_heads=2, head_size=64, dtype="float16"),),
        tokens_per_block=16,
        device_blocks=8,
    )


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param({"layers": [LAYER | {"heads": 2}]}, id="unknown field of a layer"),
        pytest.param({"engine": {"speed": 1}}, id="unknown field of the engine"),
        pytest.param({"layers": [LAYER | {"head_size": "64"}]}, id="text for a number"),
        pytest.param({"layers": [LAYER | {"head_size": -1}]}, id="negative"),
        pytest.param({"layers": [LAYER | {"head_size": 2**64}]}, id="too large for the protocol"),
        pytest.param({"layers": [LAYER] * (plans.LAYERS_MAX + 1)}, id="too many layers"),
        pytest.param({"ranks": [{}] * (RANKS_MAX + 1)}, id="too many ranks"),
        pytest.param({"backends": [{}] * (plans.BACKENDS_MAX + 1)}, id="too many backends"),
        pytest.param(
            {"layers": [LAYER | {"shapes": [{"extents": [1] * 9}]}]}, id="too many dimensions"
        ),
    ],
)
def test_malformed_inputs_are_refused(inputs: dict[str, Any]) -> None:
    """A field that is unknown, of another type or above a limit is refused, at any depth."""
    with pytest.raises(ValidationError):
        read(inputs)


def test_shards_without_a_limit_can_be_said() -> None:
    """A latent layer that all ranks can share is not taken for one that cannot be shared, which is the default."""
    layer = MLA(name="0", head_size=64, dtype="float16", tensor_shards_max=None)
    inputs = PlanInputs(layers=(layer,), tokens_per_block=16)

    assert read(_rest.to_json(inputs.to_proto())) == inputs


def test_v_heads_as_large_as_k_heads_can_be_said() -> None:
    """A latent layer with V heads like its K heads is not taken for a layer without V, which is the default."""
    layer = MLA(name="0", head_size=64, dtype="float16", head_size_v=None)
    inputs = PlanInputs(layers=(layer,), tokens_per_block=16)

    (found,) = read(_rest.to_json(inputs.to_proto())).layers

    assert found.explicit(16) == layer.explicit(16)
