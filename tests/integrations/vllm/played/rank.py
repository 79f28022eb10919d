"""Own a played rank: it writes and reads stamped memory as a model's forward pass does, and checks every read."""

from typing import Any, NamedTuple

from tests.integrations.vllm.played.stamps import (
    BLOCK_TOKENS,
    Memory,
    PrivateMemory,
    Slots,
    Stamp,
    Text,
    WrongTokenError,
)


class Span(NamedTuple):
    """The tokens of one request that a step computes."""

    request_id: str
    first: int
    end: int


class Rank:
    """The one rank of an engine; `windows` has a number of tokens for each group of layers, 0 without a window."""

    def __init__(self, memory: Memory, windows: tuple[int, ...]) -> None:
        self.memory = memory
        self.weights = 0
        self.num_found_tokens = 0
        self._windows = windows
        self._tables: dict[str, list[list[int]]] = {}
        self._texts: dict[str, Text] = {}

    @property
    def is_apart(self) -> bool:
        """Whether the memory has been made private to the engine."""
        return isinstance(self.memory, PrivateMemory)

    def part(self) -> None:
        """Make the memory private to the engine."""
        if not self.is_apart:
            self.memory = PrivateMemory(self.memory)

    def forward(self, output: Any) -> dict[str, list[int]]:
        """Carry out a step; return the tokens that each request says.

        All writes come before all reads, as layers go over all requests at once.

        Raises:
            WrongTokenError: a slot that is read was not written for its request, or was overwritten in this step.
        """
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)
            self._texts.pop(request_id, None)
        counts = output.num_scheduled_tokens
        spans = [
            Span(request_id, first, first + counts[request_id])
            for request_id, first in self._take_in(output)
        ]
        for span in spans:
            self._write(span)
        for span in spans:
            self._read(span)
        return {span.request_id: self._say(span) for span in spans}

    def _take_in(self, output: Any) -> list[tuple[str, int]]:
        """Take over the tables of a step; return each request with the number of tokens that it has."""
        firsts: list[tuple[str, int]] = []
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
            self._texts[new.req_id] = Text(new.prompt_token_ids)
            self.num_found_tokens += new.num_computed_tokens
            firsts.append((new.req_id, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for request_id, blocks, first in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = [list(of_group) for of_group in blocks]
                self.num_found_tokens += first
            elif blocks:
                for table, of_group in zip(self._tables[request_id], blocks, strict=True):
                    table.extend(of_group)
            firsts.append((request_id, first))
        return firsts

    def _write(self, span: Span) -> None:
        prefixes = self._texts[span.request_id].prefixes
        assert span.end <= len(prefixes), f"{span} goes beyond what was said"
        for group in range(len(self._windows)):
            table = self._tables[span.request_id][group]
            for position in range(span.first, span.end):
                block = table[position // BLOCK_TOKENS]
                assert block, f"{span} writes into the null block"
                stamp = Stamp(group, self.weights, prefixes[position])
                self.memory.own(block)[position % BLOCK_TOKENS] = stamp

    def _read(self, span: Span) -> None:
        prefixes = self._texts[span.request_id].prefixes
        for group, window in enumerate(self._windows):
            table = self._tables[span.request_id][group]
            first = max(0, span.first - window + 1) if window else 0
            for position in range(first, span.end):
                block = table[position // BLOCK_TOKENS]
                slots: Slots = self.memory.at(block)
                got = slots.get(position % BLOCK_TOKENS)
                wanted = Stamp(group, self.weights, prefixes[position])
                if got != wanted:
                    how = "found" if position < span.first else "just written"
                    raise WrongTokenError(
                        f"{span} reads {got} {how} in block {block} at token {position}, not {wanted}"
                    )

    def _say(self, span: Span) -> list[int]:
        text = self._texts[span.request_id]
        return [text.say()] if span.end == len(text) else []
