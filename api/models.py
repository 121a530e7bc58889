"""GET /v1/models and /v1/models/ID."""

from __future__ import annotations

from api.service import Service, require_model
from api.types import ModelInfo, ModelInfoList


def model_info(service: Service) -> ModelInfo:
    """The loaded model."""
    length = service.engine.context_length
    return ModelInfo(id=service.model_id, created=service.created, owned_by="torchchat", max_model_len=length)


def list_models(service: Service) -> ModelInfoList:
    """Every model this server answers for: one."""
    return ModelInfoList(data=[model_info(service)])


def find_model(service: Service, name: str) -> ModelInfo:
    """The model called `name`. Raises NotFoundError."""
    require_model(service, name)
    return model_info(service)
