"""The Service of a server that answers before its model is there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from api.service import Loaded, State
from engine.types import EngineProtocol, SamplingParams
from errors import TorchchatError
from models.dialects import Dialect
from models.tokenizers import Tokenizer

logger = logging.getLogger("torchchat.server")


class Loading:
    """A Service whose model is loaded by `load`, on a thread of its own, once `start` is called.

    `load` runs whole on that thread, its imports too: OpenMP ties the thread that brings it in, and all that this one
    starts, to one core. The threads of HTTP, started elsewhere, keep all of them.
    """

    max_choices = 128  # the specification's

    def __init__(self, model_id: str, load: Callable[[], Loaded], *, strict_model: bool = False) -> None:
        self.model_id = model_id
        self.strict_model = strict_model
        self.created = int(time.time())
        self.state: State = "loading"
        self.problem: str | None = None
        self._load = load
        self._loaded: Loaded | None = None
        self._draining = self._closed = False  # asked for, perhaps before it is loaded
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)

    def start(self) -> None:
        """Begin to load. Returns at once; `state` says when it is ready, or dead and `problem` why."""
        self._thread.start()

    def is_loading(self) -> bool:
        """Whether the thread still runs, though the server may have ended."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            loaded = self._load()
        except TorchchatError as error:
            self._end(error.message)
            return
        except Exception as error:
            logger.exception("Loading %s failed", self.model_id)
            self._end(f"{type(error).__name__}: {error}")
            return
        with self._lock:
            self._loaded = loaded
            self.state = "draining" if self._draining else "ready"
            closed = self._closed
        if closed:
            loaded.close()

    def _end(self, problem: str) -> None:
        with self._lock:
            self.problem = problem
            self.state = "dead"

    @property
    def loaded(self) -> Loaded:
        assert self._loaded is not None, "only asked for once it is ready"
        return self._loaded

    @property
    def engine(self) -> EngineProtocol:
        return self.loaded.engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def dialect(self) -> Dialect:
        return self.loaded.dialect

    @property
    def defaults(self) -> SamplingParams:
        return self.loaded.defaults

    @property
    def info(self) -> Mapping[str, str]:
        return {"model": self.model_id} if self._loaded is None else self._loaded.info

    def drain(self) -> None:
        """Take no more requests; running ones go on."""
        with self._lock:
            self._draining = True
            if self.state == "ready":
                self.state = "draining"

    def close(self) -> None:
        """Cancel what runs and end the engine."""
        self.drain()
        with self._lock:
            self._closed = True
            loaded = self._loaded
        if loaded is not None:
            loaded.close()
