"""Own what a layer's page is made of, as terms that explain themselves; the spec owns the bytes."""

from math import prod

from kvlease.spec import MLA, AttentionSpec, LayerSpec, RingState, SlidingWindowMLA, StateSpace
from kvlease.spec.elements import BYTES_PER_ELEMENT
from kvleased.planning.explaining.terms import Term, floor, literal, most, number, round_up, total


def state_term(spec: LayerSpec) -> Term:
    """Return the bytes of one state of one head."""
    if isinstance(spec, StateSpace):
        tensors = [
            total_of_tensor(shape, dtype)
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
        return total(tensors).by("sum over tensors of elements * bytes_per_element")
    assert isinstance(spec, AttentionSpec)
    if spec.bytes_per_state_packed is not None:
        return number("bytes_per_state_packed", spec.bytes_per_state_packed)
    head, value_head = (
        number("head_size", spec.head_size),
        number("head_size_v", spec.value_head_size),
    )
    if spec.quantisation == "nvfp4":
        return floor(head / literal(2)) + floor(head / literal(16))
    if spec.quantisation == "int4_per_token_head":
        return floor(head / literal(2)) + floor(value_head / literal(2)) + literal(8)
    elements = head + value_head if spec.value_head_size else head
    plain = elements * number("bytes_per_element", spec.bytes_per_element)
    return plain + literal(8) if spec.quantisation.endswith("per_token_head") else plain


def total_of_tensor(shape: tuple[int, ...], dtype: str) -> Term:
    """Return the bytes of one tensor of a recurrent state."""
    return number("elements", prod(shape)) * number("bytes_per_element", BYTES_PER_ELEMENT[dtype])


def states_term(spec: LayerSpec) -> Term | None:
    """Return the states that a block has for one head; None if a state is one token or a whole block."""
    if not isinstance(spec, AttentionSpec):
        return None
    tokens = number("tokens_per_block", spec.block_tokens)
    if spec.tokens_per_state > 1:
        return floor(tokens / number("tokens_per_state", spec.tokens_per_state))
    if spec.states_per_token > 1:
        return tokens * number("states_per_token", spec.states_per_token)
    return None


def page_term(spec: LayerSpec) -> Term:
    """Return the bytes of one page, with its padding."""
    content = number("bytes_per_state", spec.bytes_per_state)
    if isinstance(spec, AttentionSpec):
        states = "tokens_per_block" if states_term(spec) is None else "states_per_block"
        content = number(states, spec.states_per_block) * content
    if spec.head_slots > 1:
        content = number("head_slots", spec.head_slots) * content
    if spec.bytes_per_page == spec.content_bytes_per_page:
        return content
    multiple = spec.page_multiple_bytes if isinstance(spec, (MLA, SlidingWindowMLA)) else None
    aligned = round_up(content, number("page_multiple_bytes", multiple)) if multiple else content
    if aligned.value == spec.bytes_per_page:
        return aligned
    assert spec.bytes_per_page_padded is not None, "a page larger than its content is padded"
    return most([content, number("bytes_per_page_padded", spec.bytes_per_page_padded)])


def token_term(spec: LayerSpec, num_layers: int) -> Term | None:
    """Return the bytes that one token takes in equal layers, without padding; None if states are not of tokens."""
    if not isinstance(spec, AttentionSpec) or isinstance(spec, RingState):
        return None
    term = number("layers", num_layers)
    if spec.head_slots > 1:
        term = term * number("head_slots", spec.head_slots)
    term = term * number("bytes_per_state", spec.bytes_per_state)
    if spec.tokens_per_state > 1:
        return term / number("tokens_per_state", spec.tokens_per_state)
    if spec.states_per_token > 1:
        return term * number("states_per_token", spec.states_per_token)
    return term
