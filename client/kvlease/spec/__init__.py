"""Own what one layer keeps of a request; how layers share blocks is the planner's business.

A spec states facts about a model and its attention backend. Every number that follows from these facts is a property
here, and is computed nowhere else.
"""

from kvlease.spec.attention import (
    AttentionSpec,
    ChunkedLocal,
    CrossAttention,
    EncoderOnly,
    FullAttention,
    RetainedWindow,
    SinkAttention,
    SlidingWindow,
)
from kvlease.spec.elements import BYTES_PER_ELEMENT, QUANTISATIONS
from kvlease.spec.fields import KINDS, spec_from_fields, spec_to_fields
from kvlease.spec.latent import MLA, HiddenState, SlidingWindowMLA
from kvlease.spec.layer import LayerSpec
from kvlease.spec.state import RingState, StateSpace

__all__ = [
    "BYTES_PER_ELEMENT",
    "KINDS",
    "MLA",
    "QUANTISATIONS",
    "AttentionSpec",
    "ChunkedLocal",
    "CrossAttention",
    "EncoderOnly",
    "FullAttention",
    "HiddenState",
    "LayerSpec",
    "RetainedWindow",
    "RingState",
    "SinkAttention",
    "SlidingWindow",
    "SlidingWindowMLA",
    "StateSpace",
    "spec_from_fields",
    "spec_to_fields",
]
