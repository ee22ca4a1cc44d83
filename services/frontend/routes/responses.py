"""/v1/responses: create, and what is kept of it: get, input items, delete, cancel."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from services.frontend.documentation import error_docs, generation_docs, query_docs
from services.frontend.errors import ApiError, invalid, unsupported
from services.frontend.gateway import Gateway
from services.frontend.response_plan import plan_response
from services.frontend.response_store import StoredResponse
from services.frontend.schemas.answers import DeletedResponse, ResponseItems, ResponseObject
from services.frontend.schemas.responses import ResponsesRequest
from services.frontend.serving import serve
from services.frontend.visit import visit_of
from shared.errors import RequestError
from shared.log import get_logger

_logger = get_logger(__name__)

MAX_ITEMS = 100
_NOT_SERVED: Final = {
    "stream": "a kept response is not streamed again",
    "starting_after": "a kept response is not streamed again",
    "include_obfuscation": "a kept response is not streamed again",
    "include": "what a response includes is said when it is created",
}
_DOCS = error_docs(400, 401, 404)


def router(gateway: Gateway) -> APIRouter:
    """The routes of responses."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/responses", **generation_docs(ResponsesRequest, ResponseObject))
    async def create_response(request: Request) -> Response:
        """Answer input items; JSON, or server-sent events with `stream: true`."""
        return await serve(gateway, request, plan_response)

    @routes.get("/v1/responses/{response_id}", response_model=ResponseObject, responses=_DOCS)
    async def retrieve_response(request: Request) -> Response:
        """A response that was kept."""
        _refuse_options(request, ("stream", "starting_after", "include", "include_obfuscation"))
        return _json((await _stored(gateway, request)).object_json)

    @routes.get(
        "/v1/responses/{response_id}/input_items",
        response_model=ResponseItems,
        responses=_DOCS,
        openapi_extra=query_docs(
            limit={"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": 20},
            order={"type": "string", "enum": ["asc", "desc"], "default": "desc"},
            after={"type": "string", "description": "Id of the item before the page."},
        ),
    )
    async def list_input_items(request: Request) -> Response:
        """The items that a response answers, earlier ones included."""
        _refuse_options(request, ("include",))
        stored = await _stored(gateway, request)
        items = named_items(stored, request.path_params["response_id"])
        return _json(msgspec.json.encode(page_of(items, request.query_params)))

    @routes.delete("/v1/responses/{response_id}", response_model=DeletedResponse, responses=_DOCS)
    async def delete_response(request: Request) -> Response:
        """Forget a response; one that is still under way ends."""
        return await _delete(gateway, request)

    @routes.post(
        "/v1/responses/{response_id}/cancel",
        response_model=ResponseObject,
        responses=_DOCS,
    )
    async def cancel_response(request: Request) -> Response:
        """End a response that was created with `background: true`."""
        return await _cancel(gateway, request)

    return routes


def not_found(response_id: str) -> ApiError:
    """A 404 for a response."""
    return ApiError(
        404,
        f"Response with id '{response_id[:200]}' not found.",
        param="response_id",
        code="response_not_found",
    )


def named_items(stored: StoredResponse, response_id: str) -> list[dict[str, Any]]:
    """The items, each with an id of its own."""
    items: list[dict[str, Any]] = msgspec.json.decode(stored.input_json)
    suffix = response_id.rpartition("_")[2]
    return [
        {"type": "message", "id": f"in_{suffix}{position:04x}", **_parted(item)}
        for position, item in enumerate(items)
    ]


def page_of(items: list[dict[str, Any]], query: Any) -> dict[str, Any]:  # noqa: ANN401  # a mapping
    """One page, latest items first unless asked otherwise."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("Invalid value for 'order': use 'asc' or 'desc'.", "order")
    text = query.get("limit", "20")
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 4 else 0
    if not 1 <= limit <= MAX_ITEMS:
        raise invalid(f"Invalid 'limit': expected 1 to {MAX_ITEMS}.", "limit")
    ordered = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise invalid("Invalid 'after': there is no such item.", "after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }


def _parted(item: dict[str, Any]) -> dict[str, Any]:
    """An item whose text, if it is a message, is a list of parts."""
    content = item.get("content")
    if not isinstance(content, str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {**item, "content": [{"type": kind, "text": content}]}


def _refuse_options(request: Request, names: Sequence[str]) -> None:
    """Options of the API behind the question mark that are not served, unless they say no."""
    for key, value in request.query_params.multi_items():
        name = key.partition("[")[0]
        says_no = ("",) if name == "starting_after" else ("", "false", "0")
        if name in names and value.lower() not in says_no:
            raise unsupported(name, _NOT_SERVED[name])


async def _delete(gateway: Gateway, request: Request) -> Response:
    response_id, tenant = request.path_params["response_id"], visit_of(request.scope).tenant_id
    stored = await _stored(gateway, request)
    if not await gateway.responses.delete(response_id, tenant):
        raise not_found(response_id)
    if stored.is_open:
        await _end_work(gateway, response_id)
    return _json(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))


async def _cancel(gateway: Gateway, request: Request) -> Response:
    stored = await _stored(gateway, request)
    if not msgspec.json.decode(stored.object_json)["background"]:
        raise invalid("Cannot cancel a synchronous response.", "response_id")
    if not stored.is_open:
        return _json(stored.object_json)
    response_id, tenant = request.path_params["response_id"], visit_of(request.scope).tenant_id
    ended = await gateway.responses.cancel(response_id, tenant)
    if ended is None:
        raise not_found(response_id)
    await _end_work(gateway, response_id)
    return _json(ended.object_json)


async def _end_work(gateway: Gateway, response_id: str) -> None:
    """End the work on a response that was ended or deleted in the store, here or elsewhere."""
    gateway.background.give_up(response_id)
    try:
        await gateway.detokenizers.abort(response_id)
    except RequestError as error:
        # It has ended all the same: the process that works on it looks at the store.
        _logger.warning(
            "response not ended by the mesh: %s", error, extra={"request_id": response_id}
        )


async def _stored(gateway: Gateway, request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    stored = await gateway.responses.get(response_id, visit_of(request.scope).tenant_id)
    if stored is None:
        raise not_found(response_id)
    return stored


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")
