"""Errors on the wire: OpenAI's body with its four keys."""

from __future__ import annotations

import json

from errors import TorchchatError


def error_body(error: TorchchatError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`; ASCII, so that no text can break it."""
    keys = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return json.dumps({"error": keys}, separators=(",", ":")).encode()
