"""The loop: choose, run, record, report. One thread owns the model, the cache and every Sequence."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Sequence as List

import torch
from torch import Tensor

from engine.runner import Runner
from engine.sampling import choose, logprobs, usable
from engine.scheduler import Scheduler, Step, Work
from engine.sequence import Mailbox, Sequence
from engine.types import SEED_LIMIT, EngineStats, FinishReason, Request
from errors import ContextLengthError, EngineError, QueueFullError, RequestError, TorchchatError, UnavailableError
from models.cache import Segment

logger = logging.getLogger("torchchat.engine")

RANDOM_SEED = -1  # as llama.cpp has it: the same as none


class Engine:
    """Continuous batching over the runner's rows. `submit` may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        context_length: int,
        vocab_size: int,
        eos_ids: frozenset[int] = frozenset(),
        max_queue: int = 64,
    ) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.context_length, self.vocab_size, self.eos_ids = context_length, vocab_size, eos_ids
        self.max_queue = max_queue
        self._wake = threading.Condition()
        self._incoming: list[Sequence] = []
        self._unfinished = 0  # submitted and not yet left
        self._stopping = False
        self._died: BaseException | None = None
        self._finished: Counter[str] = Counter()
        self._prompt_tokens = self._cached_tokens = self._generated = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> Engine:
        self._thread.start()
        return self

    def stop(self) -> None:
        """End every request as cancelled and the thread with them. Returns once it has ended."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def rows(self) -> int:
        return len(self.scheduler.rows)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping and self._died is None

    def submit(self, requests: List[Request]) -> Mailbox:
        """Take all of them or none. See EngineProtocol for what it raises."""
        if len(requests) > self.rows + self.max_queue:
            raise RequestError(
                f"{len(requests)} completions in one request are more than this server holds"
                f" ({self.rows} running and {self.max_queue} waiting).",
                param="n",
            )
        for request in requests:
            self._check(request)
        mailbox = Mailbox(len(requests))
        mailbox.on_cancel = self._notify
        sequences = [self._sequence(r, mailbox, i) for i, r in enumerate(requests)]
        with self._wake:
            if not self.alive:
                raise UnavailableError("The engine is not running.")
            if self._unfinished + len(sequences) > self.rows + self.max_queue:
                waiting = max(0, self._unfinished - self.rows)
                raise QueueFullError(f"All {self.rows} rows are busy and {waiting} requests wait; try again shortly.")
            self._unfinished += len(sequences)
            self._incoming.extend(sequences)
            self._wake.notify()
        return mailbox

    def _sequence(self, request: Request, mailbox: Mailbox, index: int) -> Sequence:
        given = request.params.seed
        seed = secrets.randbelow(SEED_LIMIT) if given is None or given == RANDOM_SEED else given
        room = self.context_length - len(request.prompt)
        limit = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
        return Sequence(request, seed, limit, self.eos_ids, mailbox, index)

    def _check(self, request: Request) -> None:
        length = len(request.prompt)
        if length == 0:
            raise RequestError("The prompt is empty: it must hold at least one token.", param="prompt")
        if length >= self.context_length and not (request.params.max_tokens == 0 and length == self.context_length):
            raise ContextLengthError(
                f"The prompt has {length} tokens; this server's context is {self.context_length} tokens, of which at"
                " least one is for the answer. Shorten the prompt or start the server with a larger --max-seq-length."
            )
        params = request.params
        for name, ids in (("prompt", request.prompt), ("logit_bias", params.logit_bias), ("stop_ids", params.stop_ids)):
            wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
            if wrong is not None:
                raise RequestError(f"{name}: token id {wrong} is not in 0..{self.vocab_size - 1}.", param=name)
        if params.min_tokens and len(params.stop_ids | self.eos_ids) >= self.vocab_size:
            raise RequestError("min_tokens: every token ends the text, so none may come first.", param="min_tokens")

    def stats(self) -> EngineStats:
        with self._wake:
            running = len(self.scheduler.running)
            return EngineStats(
                running=running,
                waiting=self._unfinished - running,
                rows=self.rows,
                requests=dict(self._finished),
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._cached_tokens,
                generation_tokens=self._generated,
                alive=self.alive,
            )

    # The engine thread, from here on.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
        except BaseException as error:
            self._died = error
            logger.exception("the engine died")
        finally:
            self._abandon()

    def _wait_for_work(self) -> bool:
        """Take in what was submitted and drop what was cancelled; sleep while there is nothing to do."""
        with self._wake:
            while not (self._stopping or self._incoming or self.scheduler.busy):
                self._wake.wait()
            self.scheduler.waiting.extend(self._incoming)
            self._incoming.clear()
        for sequence in self.scheduler.drop_cancelled():
            self._leave(sequence)
        return not self._stopping

    def _step(self) -> None:
        step = self.scheduler.next_step()
        if not step.work:
            return
        try:
            for copy in step.copies:
                self.runner.copy(copy.source, copy.target, copy.length)
            self._record(step, self.runner.forward(*_inputs(step)))
        except Exception as error:
            logger.exception("a step failed; its requests end with an error")
            self._fail(_spoilt(step, self.scheduler.running), error)

    def _record(self, step: Step, logits: Tensor) -> None:
        """Store what was computed, then sample where a sequence is ready for its next token."""
        can_use = usable(logits)
        drawing: list[tuple[Sequence, int]] = []  # who needs a token, and which row of logits speaks about it
        first = 0
        for work in step.work:
            sequence, rows = work.sequence, slice(first, first + work.wanted)
            first = rows.stop
            if not all(can_use[rows]):
                self._fail([sequence], EngineError("The model's logits are not finite."))
                continue
            if sequence.prefilling and sequence.request.prompt_logprobs is not None:
                _score(work, logits[rows])
            self.scheduler.computed(work)
            if sequence.prefilling:
                continue
            if sequence.limit == 0:
                sequence.finish("length")
                self._leave(sequence)
            else:
                drawing.append((sequence, first - 1))
        if drawing:
            _sample([s for s, _ in drawing], logits[[i for _, i in drawing]])
            self._generated += len(drawing)
        for sequence, _ in drawing:
            if sequence.finished is not None:
                self._leave(sequence)

    def _fail(self, sequences: List[Sequence], error: Exception) -> None:
        """End running sequences with an error and forget what their rows hold. The engine goes on."""
        shown = error if isinstance(error, TorchchatError) else EngineError(f"The model failed: {error}")
        for sequence in sequences:
            assert sequence.row is not None
            self.runner.clear(sequence.row)
            self._leave(sequence, "error", error=shown)

    def _leave(
        self, sequence: Sequence, reason: FinishReason = "cancelled", *, error: TorchchatError | None = None
    ) -> None:
        """The one place where a sequence ends: its row is free, then its terminal event is sent."""
        sequence.finish(reason, error=error)
        with self._wake:
            self.scheduler.release(sequence, keep=error is None)
            self._unfinished -= 1
            self._finished[str(sequence.finished)] += 1
            self._prompt_tokens += sequence.prompt_length
            self._cached_tokens += sequence.cached
        sequence.close()

    def _abandon(self) -> None:
        """The thread ends: so does every stream."""
        reason: FinishReason = "cancelled" if self._died is None else "error"
        error = None if self._died is None else EngineError(f"The engine died: {self._died}")
        with self._wake:
            self._stopping = True
            left = [*self.scheduler.running, *self.scheduler.waiting, *self._incoming]
            self.scheduler.waiting.clear()
            self._incoming.clear()
        for sequence in left:
            self._leave(sequence, reason, error=error)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()


def _spoilt(step: Step, running: List[Sequence]) -> list[Sequence]:
    """Whose rows a failed step may have left half written: those that it worked on and those that it copied to."""
    worked, targets = {work.sequence for work in step.work}, {copy.target for copy in step.copies}
    return [s for s in running if s in worked or s.row in targets]


def _inputs(step: Step) -> tuple[list[Segment], list[int], list[int]]:
    """What the runner takes: segments, their tokens, and which of these need logits."""
    tokens: list[int] = []
    wanted: list[int] = []
    for work in step.work:
        tokens += work.tokens
        wanted += range(len(tokens) - work.wanted, len(tokens))
    return [work.segment for work in step.work], tokens, wanted


def _score(work: Work, logits: Tensor) -> None:
    """Log-probabilities of the prompt's own tokens: logits at a position speak about the next one."""
    sequence, start = work.sequence, work.segment.start
    top = sequence.request.prompt_logprobs
    assert top is not None
    following = sequence.request.prompt[start + 1 : start + 1 + logits.shape[0]]
    sequence.add_prompt_logprobs([logprobs(row, t, top) for row, t in zip(logits, following, strict=False)])


def _sample(sequences: List[Sequence], logits: Tensor) -> None:
    """The next token of each sequence from its row of raw logits (B, V)."""
    adjusted = logits
    if any(s.adjusts for s in sequences):
        adjusted = torch.stack([s.adjusted(row) for s, row in zip(sequences, logits, strict=True)])
    chosen = choose(adjusted, [s.params for s in sequences], [s.uniform() for s in sequences])
    for sequence, row, token_id in zip(sequences, logits, chosen, strict=True):
        top = sequence.params.logprobs
        logprob, likeliest = (None, ()) if top is None else logprobs(row, token_id, top)
        sequence.add(token_id, logprob, likeliest)
