"""The FastAPI application of a gateway."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route
from starlette.types import Scope

from services.frontend.auth import ApiKeys, own_quota
from services.frontend.documentation import describe
from services.frontend.errors import ApiError
from services.frontend.gateway import Gateway
from services.frontend.key_file import read_key_file
from services.frontend.middleware import Door, error_response
from services.frontend.routes import (
    chat,
    completions,
    dev,
    generate,
    input_tokens,
    messages,
    models,
    operations,
    responses,
    tokenize,
)
from shared.admin import software_version

# What a page of another origin may read.
EXPOSED_HEADERS: Final = (
    *("x-request-id", "request-id", "x-unknown-fields", "retry-after", "retry-after-ms"),
)


def create_app(gateway: Gateway) -> FastAPI:
    """All routes behind the door."""
    # The documentation page with its scripts served from here: no network beyond this host needed.
    app = FastAPIOffline(
        redoc_url=None, title="glm-mesh", version=software_version(), redirect_slashes=False
    )
    rooms = (
        *(chat, completions, responses, input_tokens, messages),
        *(generate, models, tokenize, operations, dev),
    )
    routers = [room.router(gateway) for room in rooms]
    for router in routers:
        app.include_router(router)
    settings = gateway.settings
    keys = [key.get_secret_value() for key in settings.api_key]
    entries = read_key_file(settings.api_key_file) if settings.api_key_file is not None else []
    make_quota = own_quota if gateway.key_counts is None else gateway.key_counts.quota
    app.add_middleware(Door, keys=ApiKeys(keys, entries, make_quota), metrics=gateway.metrics)
    if settings.allowed_origins:
        # Outside the door: a browser asks without a key whether it may ask.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )
    listed = [*app.routes, *(route for router in routers for route in router.routes)]
    routes = [route for route in listed if isinstance(route, Route)]
    app.add_exception_handler(HTTPException, _http_exception_handler(routes))
    app.add_exception_handler(RequestValidationError, _answer_validation)
    describe(app, title=app.title, version=app.version, has_keys=bool(keys or entries))
    return app


def _methods_of(routes: Sequence[Route], scope: Scope) -> list[str]:
    """The methods of a path.

    Each is a route of its own here, and the framework names those of one route. A path that is
    written out goes before one with a place for anything.
    """
    matching = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
    path = min((route.path for route in matching), key=lambda path: path.count("{"), default="")
    return sorted({m for route in matching if route.path == path for m in route.methods or ()})


def _http_exception_handler(
    routes: Sequence[Route],
) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        """The framework's own refusals: unknown path, wrong method."""
        assert isinstance(error, HTTPException)
        path, method = request.url.path, request.method
        texts = {
            404: (f"Unknown request URL: {method} {path}.", "unknown_url"),
            405: (f"{method} is not allowed for {path}.", "method_not_allowed"),
        }
        message, code = texts.get(error.status_code, (str(error.detail), None))
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers = {name: text for name, text in headers.items() if name.lower() != "allow"}
            headers["allow"] = ", ".join(_methods_of(routes, request.scope))
        return error_response(
            ApiError(error.status_code, message, code=code, headers=headers), request.scope
        )

    return answer


async def _answer_validation(request: Request, error: Exception) -> Response:
    """No handler lets the framework validate; should one ever, the answer is a 400 all the same."""
    assert isinstance(error, RequestValidationError)
    return error_response(
        ApiError(400, "The request is not valid.", code="invalid_value"), request.scope
    )
