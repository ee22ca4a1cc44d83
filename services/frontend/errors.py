"""Errors as HTTP clients see them: one envelope, OpenAI's types and string codes.

Every answer of this gateway that is not a success is
`{"error": {"message", "type", "param", "code"}}`, whoever found the fault: our own checks, the
framework (unknown path, wrong method) or a later service of the mesh (`RequestError`).
"""

import json
import math
from collections.abc import Mapping
from typing import Final

from shared.errors import FailureReason, RequestError

# Codes of failures that OpenAI's API knows; the others keep their reason's name in lower case.
_CODES: Final = {
    FailureReason.INVALID_ARGUMENT: "invalid_value",
    FailureReason.QUEUE_FULL: "rate_limit_exceeded",
    FailureReason.UPSTREAM_LOST: "service_unavailable",
    FailureReason.DRAINING: "service_unavailable",
    FailureReason.INTERNAL: "internal_error",
}
_TYPES: Final = {401: "invalid_request_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is not a success.

    Args:
        status: HTTP status.
        message: For people; names the field at fault.
        param: Path of the field, like `messages[0].role`.
        code: Short name for programs.
        headers: Further response headers.
        details: What programs need beyond the code, in protocols that have a place for it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        """Keep the facts; `str()` is the message."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = dict(details or {})

    @property
    def type(self) -> str:
        """OpenAI's class of error for the status."""
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")

    def fields(self) -> dict[str, str | None]:
        """What stands in the `error` object."""
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }

    def body(self) -> bytes:
        """The envelope as JSON; strict UTF-8 whatever the message quotes."""
        text = json.dumps({"error": self.fields()}, ensure_ascii=False)
        return text.encode("utf-8", "replace")


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """A 400 for a field."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    """A 400 for an option of the API that this version does not serve."""
    return ApiError(
        400, f"'{param}' is not supported: {why}.", param=param, code="unsupported_value"
    )


def context_exceeded(
    limit: int,
    num_prompt: int,
    max_tokens: int | None,
    param: str,
    *,
    is_lower_bound: bool = False,
) -> ApiError:
    """A 400 for a prompt, or prompt plus asked output, that does not fit; has both numbers."""
    # Without a bound of the output at least one token has to fit.
    output = "at least 1" if max_tokens is None else str(max_tokens)
    total = str(num_prompt + (max_tokens or 1))
    if is_lower_bound or max_tokens is None:
        total = f"at least {total}"
    asked = f"{num_prompt} in the prompt, {output} for the output"
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens, but {total} tokens were requested "
        f"({asked}). Shorten the prompt or the output.",
        param=param,
        code="context_length_exceeded",
    )


def from_request_error(error: RequestError, *, default_retry_ms: int = 1000) -> ApiError:
    """A failure of the mesh as an answer; 429 and 503 say when to come back."""
    status = error.outcome.http_status
    headers: dict[str, str] = {}
    if status in (429, 503):
        wait_ms = error.retry_after_ms if error.retry_after_ms is not None else default_retry_ms
        headers = {
            "retry-after": str(max(1, math.ceil(wait_ms / 1000))),
            "retry-after-ms": str(wait_ms),
        }
    return ApiError(
        status,
        error.message,
        param=error.field,
        code=_CODES.get(error.reason, error.reason.name.lower()),
        headers=headers,
    )
