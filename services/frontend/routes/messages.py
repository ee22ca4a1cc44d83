"""POST /v1/messages and /v1/messages/count_tokens."""

from fastapi import APIRouter, Request, Response

from services.frontend.documentation import body_docs, error_docs, generation_docs
from services.frontend.fields import unknown_header
from services.frontend.gateway import Gateway
from services.frontend.message_plan import count_tokens, plan_message
from services.frontend.schemas.answers import Message, MessageError, TokenCount
from services.frontend.schemas.messages import CountTokensRequest, MessagesRequest
from services.frontend.serving import admit, serve
from services.frontend.visit import visit_of


def router(gateway: Gateway) -> APIRouter:
    """The routes of messages."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/messages", **generation_docs(MessagesRequest, Message, error=MessageError))
    async def create_message(request: Request) -> Response:
        """Go on with a conversation; JSON, or server-sent events with `stream: true`."""
        return await serve(gateway, request, plan_message)

    @routes.post(
        "/v1/messages/count_tokens",
        response_model=TokenCount,
        responses=error_docs(400, 401, 404, 408, 413, 429, 503, model=MessageError),
        openapi_extra=body_docs(CountTokensRequest),
    )
    async def count_message_tokens(request: Request, response: Response) -> TokenCount:
        """How many tokens a conversation has."""
        _, body = await admit(gateway, request, visit_of(request.scope))
        num_tokens, unknown = await count_tokens(gateway, body)
        response.headers.update(unknown_header(unknown))
        return TokenCount(input_tokens=num_tokens)

    return routes
