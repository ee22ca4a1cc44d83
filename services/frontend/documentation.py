"""The OpenAPI page. Bodies are read and checked by us, so FastAPI is told about them by hand."""

import re
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.frontend.schemas.answers import (
    ChatCompletion,
    ErrorAnswer,
    Message,
    ResponseObject,
    TextCompletion,
    TokenAnswer,
)
from services.frontend.schemas.chat import ChatRequest
from services.frontend.schemas.completions import CompletionRequest
from services.frontend.schemas.generate import GenerateRequest
from services.frontend.schemas.messages import CountTokensRequest, MessagesRequest
from services.frontend.schemas.responses import ResponsesRequest
from services.frontend.schemas.tokenize import DetokenizeRequest, TokenizeRequest

_PATH_PARAMETER = re.compile(r"\{(\w+)\}")
_REF = "#/components/schemas/{model}"
# Models that no handler's signature mentions.
_DESCRIBED: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    ChatCompletion,
    TextCompletion,
    ResponsesRequest,
    ResponseObject,
    MessagesRequest,
    CountTokensRequest,
    Message,
    GenerateRequest,
    TokenAnswer,
    TokenizeRequest,
    DetokenizeRequest,
)
# One event of a stream; `data` is a JSON document or [DONE].
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_MEANINGS = {
    400: "The request is wrong; `param` names the field.",
    401: "No API key, or a wrong one.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    409: "An option that this deployment has switched off, or an id that is in use.",
    413: "The body is too large.",
    429: "Too many requests; `Retry-After` says when to come back.",
    500: "A fault of the server; the message holds an error id.",
    503: "The mesh is not ready or lost a service; `Retry-After` says when to come back.",
    504: "The time limit of the request is over.",
}


def error_docs(
    *statuses: int, model: type[BaseModel] = ErrorAnswer
) -> dict[int | str, dict[str, Any]]:
    """Descriptions of answers that are no success."""
    return {status: {"model": model, "description": _MEANINGS[status]} for status in statuses}


def body_docs(model: type[BaseModel]) -> dict[str, Any]:
    """Description of a JSON body."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def generation_docs(
    body: type[BaseModel], answer: type[BaseModel], *, error: type[BaseModel] = ErrorAnswer
) -> dict[str, Any]:
    """Description of an endpoint that generates."""
    errors = error_docs(400, 401, 404, 408, 409, 413, 429, 500, 503, 504, model=error)
    success = {
        "description": "JSON, or events with `stream: true`.",
        "content": {
            "application/json": {"schema": {"$ref": _REF.format(model=answer.__name__)}},
            "text/event-stream": {
                "schema": _EVENT,
                "example": "data: {...}\n\ndata: [DONE]\n\n",
            },
        },
    }
    return {
        "responses": {200: success, **errors},
        "response_class": Response,
        "openapi_extra": body_docs(body),
    }


def describe(app: FastAPI, *, title: str, version: str, has_keys: bool) -> None:
    """Give the application its OpenAPI document, made when first asked for.

    Args:
        app: With all its routes.
        title: Of the document.
        version: Of the software.
        has_keys: Whether /v1 asks for a key; the page then offers a field for it.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=title, version=version, routes=app.routes)
            _, bodies = models_json_schema(
                [(model, "validation") for model in _DESCRIBED], ref_template=_REF
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(bodies["$defs"])
            _describe_paths(document)
            if has_keys:
                _describe_keys(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def query_docs(**schemas: dict[str, Any]) -> dict[str, Any]:
    """Description of what may stand behind the question mark; each schema with its words."""
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in schemas.items()
        ]
    }


def _describe_paths(document: dict[str, Any]) -> None:
    """Declare what stands in braces: handlers read it themselves, so nobody else knows."""
    for path, methods in document["paths"].items():
        for method in methods.values():
            parameters = method.setdefault("parameters", [])
            parameters[:0] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in _PATH_PARAMETER.findall(path)
            ]
            if not parameters:
                del method["parameters"]


def _describe_keys(document: dict[str, Any]) -> None:
    schemes = document["components"].setdefault("securitySchemes", {})
    schemes["api_key"] = {"type": "http", "scheme": "bearer"}
    for path, methods in document["paths"].items():
        if path.startswith(("/v1/", "/inference/")):
            for method in methods.values():
                method["security"] = [{"api_key": []}]
