"""The one exception tree. Every layer may raise it; click and Flask each show it in one place.

TorchchatError                   500  server_error
+-- RequestError                 400  invalid_request_error      the request is wrong
|   +-- ContextLengthError       400  context_length_exceeded
|   +-- NotFoundError            404  model_not_found, unknown routes
+-- QueueFullError               429  rate_limit_exceeded        try again after retry_after seconds
+-- UnavailableError             503  loading, shutting down, or the engine is dead
+-- EngineError                  500  the model or the engine failed
+-- SetupError                   the command line, a file or the machine is wrong: one line for the terminal
    +-- CheckpointError          a weights or tokenizer file can't be used
    +-- DownloadError            a model can't be fetched
"""

from __future__ import annotations

from os import PathLike


class TorchchatError(Exception):
    """Base of everything we raise on purpose.

    `message` is for people; `param` names the request field or option at fault; `code` is the wire's
    machine-readable string; `status` the HTTP status; `type` the wire's error type.
    """

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after: int | None = None  # seconds; sent as the Retry-After header

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class RequestError(TorchchatError):
    """The request can't be served as it is; sending it again won't help."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(RequestError):
    """Prompt (and what it asks for) exceeds the context window."""

    code = "context_length_exceeded"


class NotFoundError(RequestError):
    """No such model or route."""

    status = 404


class QueueFullError(TorchchatError):
    """Every row is busy and the waiting line is full."""

    status = 429
    type = "rate_limit_exceeded"
    code = "rate_limit_exceeded"
    retry_after = 1


class UnavailableError(TorchchatError):
    """Loading, shutting down, or the engine is dead: the same request may work later."""

    status = 503
    type = "service_unavailable"
    retry_after = 1


class EngineError(TorchchatError):
    """A step of the engine failed; the requests of that step end with this."""


class SetupError(TorchchatError):
    """A mistake on the command line or in a file, told in one line."""

    status = 400
    type = "invalid_request_error"


class CheckpointError(SetupError):
    """A file can't be used. The message names the file, the tensor or key, and what was expected."""

    def __init__(self, path: str | PathLike[str], problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class DownloadError(SetupError):
    """A model can't be fetched; the message says what to do."""
