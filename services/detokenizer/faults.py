"""A bug that shows itself in one request: that request fails, the text stays in our log."""

import uuid

from shared.errors import FailureReason, RequestError
from shared.log import get_logger

_logger = get_logger(__name__)


def internal_error(error: Exception, request_id: str) -> RequestError:
    """Log the exception under a fresh id; only the id goes out."""
    error_id = uuid.uuid4().hex[:12]
    _logger.error(
        "request failed inside", exc_info=error, extra={"request_id": request_id, "error": error_id}
    )
    return RequestError(FailureReason.INTERNAL, f"internal error {error_id}")
