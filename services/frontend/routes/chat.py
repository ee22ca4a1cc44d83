"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from services.frontend.chat_plan import plan_chat
from services.frontend.documentation import generation_docs
from services.frontend.gateway import Gateway
from services.frontend.schemas.answers import ChatCompletion
from services.frontend.schemas.chat import ChatRequest
from services.frontend.serving import serve


def router(gateway: Gateway) -> APIRouter:
    """The route of chat completions."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/chat/completions", **generation_docs(ChatRequest, ChatCompletion))
    async def create_chat_completion(request: Request) -> Response:
        """Continue a conversation; JSON, or server-sent events with `stream: true`."""
        return await serve(gateway, request, plan_chat)

    return routes
