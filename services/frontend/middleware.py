"""The one door of the HTTP side: opens a visit, checks the key, answers what is raised.

Whatever a handler raises becomes an answer with the one envelope; nothing of it leaves.
"""

import asyncio
import uuid
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.auth import ApiKeys
from services.frontend.errors import ApiError, from_request_error
from services.frontend.framing import message_error
from services.frontend.metrics import GatewayMetrics
from services.frontend.visit import Visit, visit_of
from shared.errors import RequestError
from shared.log import get_logger

GUARDED: Final = ("/v1", "/inference", "/reset_prefix_cache")
MESSAGES: Final = "/v1/messages"
_CLIENT_CLOSED: Final = 499

_logger = get_logger(__name__)


class Door:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, metrics: GatewayMetrics) -> None:
        """Stand before `app`."""
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = Visit(scope)
        marked = _marking(visit, send, is_message=is_message_path(scope["path"]))
        is_api = any(_is_below(scope["path"], root) for root in GUARDED)
        try:
            with visit.cleanup:
                if is_api:
                    visit.start_trace(scope)
                    visit.tenant = self._keys.tenant_of(scope)
                await self._app(scope, receive, marked)
        except ClientDisconnect:
            visit.is_client_gone = True
        except asyncio.CancelledError:
            if not visit.is_client_gone:
                raise
        except Exception as error:  # noqa: BLE001  # the door of every HTTP request
            await self._answer(error, visit, scope, receive, marked)
        finally:
            self._record(visit, scope, is_api=is_api)

    async def _answer(
        self, error: Exception, visit: Visit, scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer = self._as_api_error(error, visit)
        if visit.status:
            # Too late for an answer: an incomplete response makes the server close the connection.
            _logger.warning("answer broken off: %s", answer.message, extra=_ids_of(visit))
            return
        await error_response(answer, scope)(scope, receive, send)

    def _as_api_error(self, error: Exception, visit: Visit) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, RequestError):
            return from_request_error(error)
        error_id = uuid.uuid4().hex[:12]
        _logger.error(
            "handler failed",
            exc_info=error,
            extra={"error_id": error_id, **_ids_of(visit)},
        )
        return ApiError(500, f"internal error {error_id}", code="internal_error")

    def _record(self, visit: Visit, scope: Scope, *, is_api: bool) -> None:
        if visit.is_client_gone:
            self._metrics.count_disconnect()
        status = _CLIENT_CLOSED if visit.is_client_gone else visit.status
        route = scope.get("route")
        self._metrics.count_http(
            str(getattr(route, "path", "unmatched")), _known_method(scope["method"]), status
        )
        if visit.span is not None:
            visit.span.set("http.response.status_code", status)
            if status >= 500:
                visit.span.fail(f"HTTP {status}")
            visit.span.end()
        if is_api:
            _logger.info(
                "%s %s %d in %.0f ms",
                scope["method"],
                scope["path"],
                status,
                visit.age_s * 1000,
                extra=_ids_of(visit),
            )


def _marking(visit: Visit, send: Send, *, is_message: bool) -> Send:
    """A `send` that adds the request's id and notes how far the answer is."""

    async def send_marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            visit.status = message["status"]
            name = visit.request_id.encode()
            # The Messages API calls it by another name.
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", name),
                *(((b"request-id", name),) if is_message else ()),
            ]
        elif not message.get("more_body", False):
            visit.is_complete = True
        await send(message)

    return send_marked


def error_response(error: ApiError, scope: Scope) -> Response:
    """The envelope as a response, in the shape of the protocol that was asked."""
    body = error.body()
    if is_message_path(scope.get("path", "")):
        body = message_error(error, visit_of(scope).request_id)
    return Response(body, error.status, headers=error.headers, media_type="application/json")


def is_message_path(path: str) -> bool:
    """Whether a path belongs to the Messages API."""
    return _is_below(path, MESSAGES)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


def _ids_of(visit: Visit) -> dict[str, str]:
    """One id in the logs of all services, the label that the client knows, the seed."""
    ids = {"request_id": visit.response_id or visit.request_id, "label": visit.request_id}
    return ids if visit.seed is None else {**ids, "seed": str(visit.seed)}


def _known_method(method: str) -> str:
    """Labels of metrics must not be the client's to invent."""
    return method if method in {"GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"} else "other"
