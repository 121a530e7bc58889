"""Stop strings, matched on text as it arrives."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Lets text through up to the first stop string, holding back only what may be the beginning of one.

    The stop that is completed first, character by character, wins; of those completed by the same character, the
    longest. So the answer does not depend on where tokens cut the text. Empty stops are ignored.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the text keeps the stop string itself."""
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that is certain now. Sets `matched` when a stop is complete; nothing may be pushed after that."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.matched = True
            self._held = ""
            return text[: end if self._include else start]
        certain = len(text) - max(_begun(text, stop) for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back: the text has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins, and does not complete, `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0
