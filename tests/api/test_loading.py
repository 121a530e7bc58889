"""A server whose model is still to come."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from api.loading import Loaded, Loading
from api.service import require_ready, why_not
from errors import CheckpointError, UnavailableError
from tests.api.fakes import FakeService


class Later:
    """A `load` that ends when told to."""

    def __init__(self, made: FakeService | Exception) -> None:
        self.made = made
        self.go = threading.Event()

    def __call__(self) -> Loaded:
        assert self.go.wait(10)
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


def begun(later: Callable[[], Loaded]) -> Loading:
    loading = Loading("tiny", later)
    loading.start()
    return loading


def test_ready_once_it_is_loaded(service: FakeService) -> None:
    later = Later(service)
    loading = begun(later)
    assert loading.is_loading()
    assert dict(loading.info) == {"model": "tiny"}
    with pytest.raises(UnavailableError, match="tiny is still loading") as caught:
        require_ready(loading)
    assert caught.value.retry_after
    later.go.set()
    loading._thread.join(10)
    assert not loading.is_loading()
    assert why_not(loading) is None
    assert (loading.engine, loading.tokenizer, loading.dialect) == (service.engine, service.tokenizer, service.dialect)
    assert (loading.defaults, loading.info) == (service.defaults, service.info)
    loading.drain()
    assert why_not(loading) == "The server is shutting down."
    loading.close()
    assert service.engine.closed.is_set()


@pytest.mark.parametrize(
    ("error", "problem", "logged"),
    [(CheckpointError("w.gguf", "cut off"), "w.gguf: cut off", 0), (KeyError("x"), "KeyError: 'x'", 1)],
)
def test_a_failed_load_says_why(error: Exception, problem: str, logged: int, caplog: pytest.LogCaptureFixture) -> None:
    later = Later(error)
    loading = begun(later)
    later.go.set()
    loading._thread.join(10)
    assert (loading.state, loading.problem) == ("dead", problem)
    assert why_not(loading) == f"The engine is dead: {problem}"
    assert len(caplog.records) == logged  # only what is our own fault, with its traceback
    loading.close()


def test_what_ends_while_it_loads_is_never_ready(service: FakeService) -> None:
    later = Later(service)
    loading = begun(later)
    loading.close()
    assert not service.engine.closed.is_set()
    later.go.set()
    loading._thread.join(10)
    assert loading.state == "draining"
    assert service.engine.closed.is_set()
