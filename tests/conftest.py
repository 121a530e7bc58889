"""Shared fixtures. Real weights are fetched once by `make test`, never inside a test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, as `torchchat.py download smollm2` (or TORCHCHAT_TEST_SMOLLM2) left it."""
    given = os.environ.get("TORCHCHAT_TEST_SMOLLM2")
    if given is not None:
        return Path(given)
    from models import registry

    path = registry.where("smollm2")
    if path is None:
        pytest.skip("smollm2 is not on this machine: run `python torchchat.py download smollm2` (make test does)")
    return path
