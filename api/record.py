"""What one HTTP request did, from its first byte to its log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from api.metrics import Metrics
from api.timing import Timing
from errors import EngineError, TorchchatError

logger = logging.getLogger("torchchat.server")
access = logging.getLogger("torchchat.access")

Chunk = TypeVar("Chunk")

MAX_PROBLEM = 300  # characters of a problem in the log: it may quote the client, who may have said a lot


def internal_error(request_id: str) -> EngineError:
    """What a client learns of a fault of ours."""
    return EngineError(f"The server failed; its log says why, under {request_id}.")


class Record:
    """What one request did, for its log line and the histograms."""

    def __init__(self, request_id: str, metrics: Metrics) -> None:
        self.id = request_id
        self.metrics = metrics
        self.started = time.perf_counter()
        self.timing: Timing | None = None  # of a generation
        self.problem: str | None = None

    def told(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The same chunks; what goes wrong among them is noted, and is one of our errors."""
        try:
            yield from chunks
        except TorchchatError as error:
            self.problem = error.message
            raise
        except Exception as error:
            logger.exception("Request %s failed", self.id)
            self.problem = repr(error)
            raise internal_error(self.id) from error

    def close(self, route: str, status: int) -> None:
        """Write the log line and the histograms."""
        line = [f"id={self.id}", f"route={route}", f"status={status}"]
        timing = self.timing
        if timing is not None:
            line.append(timing.describe())
            if timing.first is not None:
                self.metrics.first_token.observe(timing.first)
            self.metrics.request.observe(time.perf_counter() - self.started)
        if self.problem is not None:
            line.append(f"problem={self.problem[:MAX_PROBLEM]!r}")
        access.info(" ".join(line))
