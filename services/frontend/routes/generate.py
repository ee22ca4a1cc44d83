"""Token in, token out: render a prompt to ids, generate ids from ids."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from services.frontend.bodies import Body
from services.frontend.documentation import body_docs, error_docs, generation_docs
from services.frontend.fields import unknown_header
from services.frontend.gateway import Gateway
from services.frontend.generate_plan import plan_tokens, render_chat, render_completion
from services.frontend.schemas.answers import RenderedRequest, TokenAnswer
from services.frontend.schemas.chat import ChatRequest
from services.frontend.schemas.completions import CompletionRequest
from services.frontend.schemas.generate import GenerateRequest
from services.frontend.serving import admit, serve
from services.frontend.visit import Visit, visit_of

Render = Callable[[Gateway, Body, Visit], Awaitable[tuple[Any, list[str]]]]
_ERRORS = error_docs(400, 401, 404, 408, 413, 429, 503)


def router(gateway: Gateway) -> APIRouter:
    """The routes of tokens."""
    routes = APIRouter(tags=["tokens"])

    @routes.post(
        "/v1/chat/completions/render",
        response_model=RenderedRequest,
        responses=_ERRORS,
        openapi_extra=body_docs(ChatRequest),
    )
    async def render_chat_completion(request: Request) -> Response:
        """A chat as the generate request that answers it."""
        return await _render(gateway, request, render_chat)

    @routes.post(
        "/v1/completions/render",
        response_model=list[RenderedRequest],
        responses=_ERRORS,
        openapi_extra=body_docs(CompletionRequest),
    )
    async def render_text_completion(request: Request) -> Response:
        """Prompts as the generate requests that answer them."""
        return await _render(gateway, request, render_completion)

    @routes.post("/inference/v1/generate", **generation_docs(GenerateRequest, TokenAnswer))
    async def generate(request: Request) -> Response:
        """Go on with token ids; JSON, or server-sent events with `stream: true`."""
        return await serve(gateway, request, plan_tokens)

    return routes


async def _render(gateway: Gateway, request: Request, render: Render) -> Response:
    visit = visit_of(request.scope)
    _, body = await admit(gateway, request, visit)
    made, unknown = await render(gateway, body, visit)
    headers = unknown_header(unknown)
    return Response(msgspec.json.encode(made), headers=headers, media_type="application/json")
