"""The family of errors that cross a service's door, and the one table of what they mean outside.

    GlmMeshError
    |- ConfigError          a setting is wrong; the process does not start
    |- CheckpointError      a checkpoint file is wrong; the process does not start
    `- RequestError         one request fails, with a `FailureReason`

`OUTCOMES` maps each reason to the gRPC status name, the HTTP status and whether a retry can help;
every door reads it, so a reason looks the same from whichever side it is seen.
"""

import enum
from dataclasses import dataclass


class GlmMeshError(Exception):
    """Root of the family; never raised itself."""


class ConfigError(GlmMeshError):
    """A setting is wrong. The text names field, value and bound."""


class CheckpointError(GlmMeshError):
    """A checkpoint cannot be used. The text names file, tensor and reason."""


class FailureReason(enum.IntEnum):
    """Why a request failed; the numbers are those of glm.v1.FailureReason."""

    INVALID_ARGUMENT = 1
    CONTEXT_LENGTH_EXCEEDED = 2
    KV_CAPACITY_EXCEEDED = 3
    FEATURE_DISABLED = 4
    QUEUE_FULL = 5
    DRAINING = 6
    UPSTREAM_LOST = 7
    DEADLINE_EXCEEDED = 8
    SLOW_READER = 9
    INTERNAL = 10
    ALREADY_EXISTS = 11
    CANCELLED = 12
    NUMERICAL_ERROR = 13


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a reason is shown: gRPC status name, HTTP status, whether a retry can help."""

    grpc_status: str
    http_status: int
    is_retryable: bool


OUTCOMES: dict[FailureReason, Outcome] = {
    FailureReason.INVALID_ARGUMENT: Outcome("INVALID_ARGUMENT", 400, False),
    FailureReason.CONTEXT_LENGTH_EXCEEDED: Outcome("OUT_OF_RANGE", 400, False),
    FailureReason.KV_CAPACITY_EXCEEDED: Outcome("OUT_OF_RANGE", 400, False),
    FailureReason.FEATURE_DISABLED: Outcome("FAILED_PRECONDITION", 409, False),
    FailureReason.QUEUE_FULL: Outcome("RESOURCE_EXHAUSTED", 429, True),
    FailureReason.DRAINING: Outcome("UNAVAILABLE", 503, True),
    FailureReason.UPSTREAM_LOST: Outcome("UNAVAILABLE", 503, True),
    FailureReason.DEADLINE_EXCEEDED: Outcome("DEADLINE_EXCEEDED", 504, False),
    FailureReason.SLOW_READER: Outcome("ABORTED", 503, False),
    FailureReason.INTERNAL: Outcome("INTERNAL", 500, True),
    FailureReason.ALREADY_EXISTS: Outcome("ALREADY_EXISTS", 409, False),
    FailureReason.CANCELLED: Outcome("CANCELLED", 499, False),
    FailureReason.NUMERICAL_ERROR: Outcome("INTERNAL", 500, True),
}


class RequestError(GlmMeshError):
    """One request fails; all others go on.

    Args:
        reason: Why.
        message: For people; never the text of a foreign exception.
        field: The request field at fault, if one is.
        retry_after_ms: Least wait before a retry, milliseconds.
        may_go_on: Whether the sequence had no part in it, and may go on elsewhere.
    """

    def __init__(
        self,
        reason: FailureReason,
        message: str,
        *,
        field: str | None = None,
        retry_after_ms: int | None = None,
        may_go_on: bool = False,
    ) -> None:
        """Keep the facts; `str()` is the message."""
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.may_go_on = may_go_on

    @property
    def outcome(self) -> Outcome:
        """How the reason is shown outside."""
        return OUTCOMES[self.reason]
