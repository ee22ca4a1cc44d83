"""POST /v1/completions."""

from fastapi import APIRouter, Request, Response

from services.frontend.completion_plan import plan_completion
from services.frontend.documentation import generation_docs
from services.frontend.gateway import Gateway
from services.frontend.schemas.answers import TextCompletion
from services.frontend.schemas.completions import CompletionRequest
from services.frontend.serving import serve


def router(gateway: Gateway) -> APIRouter:
    """The route of completions."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/completions", **generation_docs(CompletionRequest, TextCompletion))
    async def create_completion(request: Request) -> Response:
        """Continue texts; JSON, or server-sent events with `stream: true`."""
        return await serve(gateway, request, plan_completion)

    return routes
