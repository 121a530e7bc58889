"""Runs that alternate, and what is said about them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping


def alternate(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each run once a round, in turn, after one unmeasured round: a noisy moment hits neighbours alike."""
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    return found


def report(found: Mapping[str, list[float]], unit: str, *, against: str | None = None) -> None:
    """Medians with their spread; then the median of each round's ratio to `against`."""
    for name, values in found.items():
        low, high = min(values), max(values)
        print(f"{name:32} {statistics.median(values):9.1f} {unit}   ({low:.1f} .. {high:.1f})")
    if against is not None:
        for name, values in found.items():
            if name != against:
                ratios = [a / b for a, b in zip(values, found[against], strict=True)]
                print(
                    f"{name} / {against}: {statistics.median(ratios):.2f} x   ({min(ratios):.2f} .. {max(ratios):.2f})"
                )
