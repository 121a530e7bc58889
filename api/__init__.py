"""The wire: OpenAI's dataclasses, and the way from a request's JSON to engine requests and from text events back
to JSON. No flask, no torch."""
