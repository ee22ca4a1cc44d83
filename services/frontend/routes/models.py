"""GET /v1/models and /v1/models/{id}."""

from datetime import UTC, datetime

from fastapi import APIRouter, Request

from services.frontend.documentation import error_docs
from services.frontend.gateway import Gateway, model_not_found
from services.frontend.schemas.answers import Model, ModelList


def router(gateway: Gateway) -> APIRouter:
    """The routes of models."""
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/models", response_model=ModelList, responses=error_docs(401))
    async def list_models() -> ModelList:
        """All served names."""
        names = gateway.settings.model_names
        models = [_model(gateway, name) for name in names]
        return ModelList(data=models, first_id=names[0], last_id=names[-1])

    # A path and no parameter of the handler: names may hold slashes, and nothing can be a 422.
    @routes.get("/v1/models/{model_id:path}", response_model=Model, responses=error_docs(401, 404))
    async def retrieve_model(request: Request) -> Model:
        """One served name."""
        name = request.path_params["model_id"]
        if name not in gateway.settings.model_names:
            raise model_not_found(name)
        return _model(gateway, name)

    return routes


def _model(gateway: Gateway, name: str) -> Model:
    return Model(
        id=name,
        created=gateway.started_s,
        root=gateway.model_name,
        max_model_len=gateway.max_model_len,
        display_name=name,
        created_at=datetime.fromtimestamp(gateway.started_s, UTC).isoformat(),
    )
