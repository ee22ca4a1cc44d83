"""POST /v1/responses/input_tokens: how much of the context an input takes."""

from fastapi import APIRouter, Request, Response

from services.frontend.documentation import body_docs, error_docs
from services.frontend.fields import unknown_header
from services.frontend.gateway import Gateway
from services.frontend.response_plan import count_input
from services.frontend.schemas.answers import InputTokens
from services.frontend.schemas.responses import ResponsesRequest
from services.frontend.serving import admit
from services.frontend.visit import visit_of


def router(gateway: Gateway) -> APIRouter:
    """The route that counts."""
    routes = APIRouter(tags=["generation"])

    @routes.post(
        "/v1/responses/input_tokens",
        response_model=InputTokens,
        responses=error_docs(400, 401, 404, 408, 413, 429, 503),
        openapi_extra=body_docs(ResponsesRequest),
    )
    async def count_input_tokens(request: Request, response: Response) -> InputTokens:
        """How many tokens the model would see of an input, earlier responses included."""
        visit = visit_of(request.scope)
        _, body = await admit(gateway, request, visit)
        num_tokens, unknown = await count_input(gateway, body, visit)
        response.headers.update(unknown_header(unknown))
        return InputTokens(input_tokens=num_tokens)

    return routes
