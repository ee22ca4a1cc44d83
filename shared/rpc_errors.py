"""Errors on their way through gRPC: `RequestError` out to a status, a status in to `RequestError`.

A status carries an ErrorInfo whose reason is a `FailureReason`, so that a peer gets back the very
error that was raised. Anything else that a handler raises becomes INTERNAL with an error id; the
text of a foreign exception stays in the log of the process where it happened.
"""

import asyncio
import contextlib
import functools
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared.errors import FailureReason, RequestError
from shared.log import get_logger

ERROR_DOMAIN: Final = "glm-mesh"
# gRPC refuses metadata from 8 KB on at random; details and text together stay below half of it.
MAX_MESSAGE_CHARS: Final = 500

# Names that gRPC fixes.
DETAILS_KEY: Final = "grpc-status-details-bin"
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"

_logger = get_logger(__name__)

# Statuses that gRPC itself makes, without an ErrorInfo of ours.
_REASON_OF_CODE: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: FailureReason.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE: FailureReason.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION: FailureReason.FEATURE_DISABLED,
    grpc.StatusCode.UNIMPLEMENTED: FailureReason.FEATURE_DISABLED,
    grpc.StatusCode.ALREADY_EXISTS: FailureReason.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED: FailureReason.QUEUE_FULL,
    grpc.StatusCode.UNAVAILABLE: FailureReason.UPSTREAM_LOST,
    grpc.StatusCode.ABORTED: FailureReason.UPSTREAM_LOST,
    grpc.StatusCode.DEADLINE_EXCEEDED: FailureReason.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: FailureReason.CANCELLED,
}

Context: TypeAlias = grpc.aio.ServicerContext
Handler = Callable[[Any, Context], Any]


async def abort_with(context: Context, error: RequestError) -> NoReturn:
    """End the call with the error's status and details."""
    status = _status_of(error)
    metadata = [(DETAILS_KEY, status.SerializeToString())]
    if error.retry_after_ms is not None:
        # Heeded by gRPC's own retries of idempotent methods.
        metadata.append((PUSHBACK_KEY, str(error.retry_after_ms)))
    code = grpc.StatusCode[error.outcome.grpc_status]
    await context.abort(code, status.message, tuple(metadata))
    raise AssertionError("abort returned")


def error_from_rpc(exc: grpc.aio.AioRpcError) -> RequestError:
    """What a failed call means: the peer's own error, or the reason that fits gRPC's status."""
    details = _our_details(exc)
    if details is None:
        reason = _REASON_OF_CODE.get(exc.code(), FailureReason.INTERNAL)
        return RequestError(reason, f"the next service answered {exc.code().name}")
    reason_name, field, retry_after_ms = details
    known = FailureReason.__members__.get(reason_name, FailureReason.INTERNAL)
    return RequestError(known, exc.details() or "", field=field, retry_after_ms=retry_after_ms)


class ExceptionGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # untyped library
    """Stands around every handler, streams included, and decides what an exception looks like."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        make, behaviour = _factory_of(handler)
        return make(
            _guarded(behaviour, method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _factory_of(handler: grpc.RpcMethodHandler) -> tuple[Callable[..., Any], Handler]:
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler, handler.unary_unary
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    return grpc.stream_stream_rpc_method_handler, handler.stream_stream


def _guarded(behaviour: Handler, method: str) -> Handler:
    """The same handler in the same style (coroutine or async generator), guarded."""
    if inspect.isasyncgenfunction(behaviour):

        @functools.wraps(behaviour)
        async def guarded_generator(request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401  # any message
            try:
                async with contextlib.aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception as error:  # noqa: BLE001  # the door of every call
                await _end_with(context, error, method)

        return guarded_generator

    @functools.wraps(behaviour)
    async def guarded(request: Any, context: Context) -> Any:  # noqa: ANN401  # any message
        try:
            return await behaviour(request, context)
        except Exception as error:  # noqa: BLE001  # the door of every call
            await _end_with(context, error, method)

    return guarded


async def _end_with(context: Context, error: Exception, method: str) -> NoReturn:
    """Turn an exception into the end of its call; CancelledError never comes here."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if context.cancelled():
        raise asyncio.CancelledError from error
    request_error = _request_error_in(error)
    if request_error is None:
        error_id = uuid.uuid4().hex[:12]
        _logger.error(
            "handler failed", exc_info=error, extra={"error_id": error_id, "method": method}
        )
        request_error = RequestError(FailureReason.INTERNAL, f"internal error {error_id}")
    await abort_with(context, request_error)


def _request_error_in(error: BaseException) -> RequestError | None:
    """The error itself, or the one that ended a task group."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [_request_error_in(part) for part in error.exceptions]
        return found[0] if all(found) else None
    return None


def _status_of(error: RequestError) -> status_pb2.Status:
    outcome = error.outcome
    info = error_details_pb2.ErrorInfo(reason=error.reason.name, domain=ERROR_DOMAIN)
    message = error.message[:MAX_MESSAGE_CHARS]
    status = status_pb2.Status(code=code_pb2.Code.Value(outcome.grpc_status), message=message)
    status.details.append(_packed(info))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field[:200])
        status.details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def _packed(message: Any) -> any_pb2.Any:  # noqa: ANN401  # any message
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _our_details(exc: grpc.aio.AioRpcError) -> tuple[str, str | None, int | None] | None:
    """Reason, field and retry delay of a status of ours; None for any other."""
    try:
        status = rpc_status.from_call(exc)
    except ValueError:  # details that contradict the status: not ours
        return None
    if status is None:
        return None
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    field: str | None = None
    retry_after_ms: int | None = None
    for detail in status.details:
        detail.Unpack(info)
        if detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        if detail.Unpack(retry):
            retry_after_ms = retry.retry_delay.ToMilliseconds()
    if info.domain != ERROR_DOMAIN:
        return None
    return info.reason, field, retry_after_ms
