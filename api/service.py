"""What the HTTP side holds of everything behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from engine.types import EngineProtocol, SamplingParams
from errors import NotFoundError, UnavailableError
from models.dialects import Dialect
from models.tokenizers import Tokenizer

State = Literal["loading", "ready", "draining", "dead"]


class Loaded(Protocol):
    """A model that runs."""

    @property
    def engine(self) -> EngineProtocol: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def dialect(self) -> Dialect: ...

    @property
    def defaults(self) -> SamplingParams:
        """What a request leaves out: the server's flags, generation_config.json, OpenAI's defaults; complete."""

    @property
    def info(self) -> Mapping[str, str]:
        """version, model, device, dtype, quantize."""

    def close(self) -> None:
        """Cancel what runs and end the engine."""


class Service(Loaded, Protocol):
    """A model that runs, or is being loaded. Only `state`, `problem`, `model_id`, `created` and `info` may be read
    before it is ready."""

    @property
    def model_id(self) -> str: ...

    @property
    def created(self) -> int:
        """When loading began, in seconds since 1970."""

    @property
    def state(self) -> State: ...

    @property
    def problem(self) -> str | None:
        """Why it is dead, in one line."""

    @property
    def strict_model(self) -> bool:
        """Whether a request for another model is refused."""

    @property
    def max_choices(self) -> int:
        """The largest `n` of one request."""

    def drain(self) -> None:
        """Take no more requests; running ones go on. Returns at once."""


def why_not(service: Service) -> str | None:
    """Why no generation would run now; None when one would."""
    if service.state == "loading":
        return f"{service.model_id} is still loading; try again soon."
    if service.state == "draining":
        return "The server is shutting down."
    if service.state == "dead" or not service.engine.alive:
        return f"The engine is dead: {service.problem}" if service.problem else "The engine is dead."
    return None


def require_ready(service: Service) -> None:
    """Raises UnavailableError unless a generation would run now."""
    problem = why_not(service)
    if problem is not None:
        raise UnavailableError(problem)


def require_model(service: Service, name: str) -> None:
    """Raises NotFoundError unless `name` is the loaded model."""
    if name != service.model_id:
        message = f"The model {name!r} does not exist here; this server has {service.model_id!r}."
        raise NotFoundError(message, param="model", code="model_not_found")
