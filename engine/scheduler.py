"""Who runs in the next step, and in which row. No tensors here.

Rows keep the tokens of their last sequence, so that a prompt which begins like any row, free or running, prefills only
the rest. Running sequences decode in every step; what is left of the step's budget goes to prompts, oldest first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from engine.sequence import Sequence
from models.cache import Segment

CHUNK = 256  # prompt tokens a step may take when nobody is decoding
SHARED_CHUNK = 32  # and when somebody is: his next token waits for them


@dataclass(slots=True)
class Row:
    """A place in the batch and the cache. `tokens` are those whose keys and values it holds."""

    index: int
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    used: int = 0  # when its last sequence left; smaller is longer ago


@dataclass(frozen=True, slots=True)
class Copy:
    """`length` positions to copy from one cache row to another before the step."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's share of a step: its tokens of `segment`, of which the last `wanted` need logits."""

    sequence: Sequence
    segment: Segment
    wanted: int

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.segment.start : self.segment.end]


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass does: copies first, then the work."""

    copies: list[Copy]
    work: list[Work]


class Scheduler:
    """Owns rows and the waiting line."""

    def __init__(self, rows: int, *, reuse: bool = True, chunk: int = CHUNK, shared_chunk: int = SHARED_CHUNK) -> None:
        self.rows = [Row(i) for i in range(rows)]
        self.waiting: deque[Sequence] = deque()
        self.reuse, self.chunk, self.shared_chunk = reuse, chunk, shared_chunk
        self._clock = count(1)

    @property
    def running(self) -> list[Sequence]:
        return [row.sequence for row in self.rows if row.sequence is not None]

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(row.sequence is not None for row in self.rows)

    def next_step(self) -> Step:
        """Admit what fits, then share out the step."""
        copies = self._admit()
        running = self.running
        decoding = [s for s in running if not s.prefilling]
        work = [_work(s, 1) for s in decoding]
        budget = self.shared_chunk if decoding else self.chunk
        for sequence in sorted((s for s in running if s.prefilling), key=lambda s: s.order):
            if budget > 0:
                work.append(_work(sequence, min(budget, sequence.prompt_length - sequence.done)))
                budget -= work[-1].segment.count
        return Step(copies, work)

    def computed(self, work: Work) -> None:
        """The step ran: the row now holds the segment's tokens."""
        self.rows[work.segment.row].tokens.extend(work.tokens)
        work.sequence.done = work.segment.end

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Free the sequence's row; `keep` says whether its contents can be trusted."""
        if sequence.row is None:
            return
        row = self.rows[sequence.row]
        row.sequence, sequence.row, row.used = None, None, next(self._clock)
        if not keep:
            row.tokens.clear()

    def drop_cancelled(self) -> list[Sequence]:
        """Take cancelled sequences out of the line, and return them with those that still hold a row."""
        gone = [s for s in [*self.waiting, *self.running] if s.cancelled]  # asked once: other threads cancel meanwhile
        if gone:
            self.waiting = deque(s for s in self.waiting if s not in gone)
        return gone

    def _admit(self) -> list[Copy]:
        """Give free rows to waiting sequences, first come first served, but for those who gain by waiting a little."""
        copies, held = [], []
        while self.waiting and any(row.sequence is None for row in self.rows):
            sequence = self.waiting.popleft()
            if self._gains_by_waiting(sequence):
                held.append(sequence)
                continue
            copy = self._place(sequence)
            if copy is not None:
                copies.append(copy)
        self.waiting.extendleft(reversed(held))
        return copies

    def _gains_by_waiting(self, sequence: Sequence) -> bool:
        """Whether a prompt with the same beginning is being computed right now: better copied than computed twice."""
        if not self._may_reuse(sequence):
            return False
        now = max(common_prefix(row.tokens, sequence.tokens) for row in self.rows)
        soon = max((common_prefix(s.tokens, sequence.tokens) for s in self.running if s.prefilling), default=0)
        return min(soon, sequence.prompt_length - 1) > now + self.shared_chunk

    def _may_reuse(self, sequence: Sequence) -> bool:
        return self.reuse and sequence.request.prompt_logprobs is None

    def _place(self, sequence: Sequence) -> Copy | None:
        """Seat a sequence in a free row, with as much of its prompt as any row already holds."""
        free = sorted((row for row in self.rows if row.sequence is None), key=lambda row: (bool(row.tokens), row.used))
        source, length = free[0], 0
        if self._may_reuse(sequence):
            # at least the last token is computed, since its logits are needed
            most = sequence.prompt_length - 1
            ready = [(min(most, common_prefix(row.tokens, sequence.tokens)), row) for row in self.rows]
            found, best = max(ready, key=lambda pair: (pair[0], pair[1].sequence is None, -len(pair[1].tokens)))
            if found:
                source, length = best, found
        # Take a free row over when most of it is used again; else leave its conversation there and copy the beginning.
        mostly = length == 0 or 2 * length >= len(source.tokens)
        takes_over = source.sequence is None and (mostly or len(free) == 1)
        row = source if takes_over else next(r for r in free if r is not source)
        copy = Copy(source.index, row.index, length) if row is not source and length else None
        row.tokens = source.tokens[:length]
        row.sequence, sequence.row, sequence.order = sequence, row.index, next(self._clock)
        sequence.done = sequence.cached = length
        return copy


def _work(sequence: Sequence, count: int) -> Work:
    assert sequence.row is not None
    segment = Segment(sequence.row, sequence.done, count)
    if sequence.prefilling and sequence.request.prompt_logprobs is not None:
        return Work(sequence, segment, count)
    return Work(sequence, segment, int(segment.end >= sequence.prompt_length))


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two lists have in common from the start, by bisection: slices compare at C's speed."""
    same, most = 0, min(len(a), len(b))
    while same < most:
        middle = (same + most + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same
