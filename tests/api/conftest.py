from __future__ import annotations

import pytest

from tests.api.fakes import FakeService


@pytest.fixture
def service() -> FakeService:
    return FakeService()
