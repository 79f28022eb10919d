"""Own the laws of progress: a request is gone over when it comes to another chunk, and not otherwise."""

from dataclasses import dataclass

from kvlease.integrations.vllm.offload.progress import Progress


@dataclass(slots=True)
class Request:
    """The fields of a vLLM request that progress reads."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int


def generate(progress: Progress, request: Request, num_steps: int) -> list[int]:
    """Have a request generate one token a step; return the numbers of tokens after which it was gone over."""
    found = []
    for _ in range(num_steps):
        if progress.due({request.request_id: 1}):
            found.append(request.num_computed_tokens + 1)
        request.num_computed_tokens += 1
        request.num_tokens += 1
    return found


def test_request_that_generates_is_due_once_a_chunk() -> None:
    """A prompt is due in every step that ends in another chunk, a generated token if it is the last of its chunk."""
    progress = Progress([32])
    request = Request("r", 0, 70)
    progress.note(request)

    assert progress.due({"r": 40}) == {"r": 40}
    request.num_computed_tokens = 40
    assert progress.due({"r": 10}) == {}
    request.num_computed_tokens = 50
    assert progress.due({"r": 20}) == {"r": 20}
    request.num_computed_tokens, request.num_tokens = 70, 71
    assert generate(progress, request, 70) == [96, 128]


def test_chunks_of_several_groups_all_count() -> None:
    """With chunks of 64 and 96 tokens in two groups, no end of a chunk is missed."""
    progress = Progress([64, 96])
    request = Request("r", 0, 1)
    progress.note(request)

    assert {64, 96, 128, 192} <= set(generate(progress, request, 200))


def test_tokens_that_are_not_known_yet_do_not_count() -> None:
    """A step that is scheduled ahead reaches a chunk's end only when the chunk's last token is known."""
    progress = Progress([32])
    request = Request("r", 30, 31)
    progress.note(request)
    progress.due({"r": 1})
    request.num_computed_tokens = 31

    assert progress.due({"r": 1}) == {}
    request.num_computed_tokens, request.num_tokens = 32, 32
    assert progress.due({"r": 1}) == {"r": 1}


def test_everybody_is_due_again_after_a_reset_and_a_preemption() -> None:
    """Content that was stored under other keys, or is computed anew, is gone over once more."""
    progress = Progress([32])
    request = Request("r", 64, 65)
    progress.note(request)
    assert progress.due({"r": 1})
    assert not progress.due({"r": 1})

    progress.restart()
    assert progress.due({"r": 1})
    request.num_computed_tokens = 0
    assert progress.due({"r": 33})


def test_who_is_put_off_is_due_in_its_next_step() -> None:
    """A request that is put off is due in its next step, also without a further chunk; after a preemption, too."""
    progress = Progress([32])
    request = Request("r", 0, 64)
    progress.note(request)

    assert progress.due({"r": 64, "s": 1}, put_off=["r"]) == {"s": 1}
    request.num_computed_tokens, request.num_tokens = 64, 65
    assert progress.due({"r": 1}) == {"r": 1}
    assert progress.due({"r": 1}) == {}
    assert progress.due({"r": 64}, put_off=["r"]) == {}
    assert progress.due({"r": 1}) == {"r": 1}


def test_who_is_not_known_is_always_due() -> None:
    """A request that was never noted is always due; one that has ended is forgotten, and its name is free."""
    progress = Progress([32])
    progress.note(Request("r", 64, 65))
    progress.due({"r": 1})
    assert repr(progress) == "<Progress 1 requests, chunks of 32 tokens>"

    progress.forget(["r"])

    assert progress.due({"r": 1, "s": 1}) == {"r": 1, "s": 1}
    assert progress.due({"r": 1}) == {"r": 1}
    progress.note(Request("r", 64, 65))
    assert progress.due({"r": 1}) == {"r": 1}
