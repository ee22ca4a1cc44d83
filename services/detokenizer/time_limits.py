"""How long a request may take, whoever works on it and however often it moved.

Schedulers are told what is left of these limits and are usually first to end a late request. Where
none is there, or the one that has the request stands still, it ends here.
"""

from dataclasses import dataclass
from typing import Final

from shared.errors import FailureReason, RequestError

FIRST_TOKEN_FIELD: Final = "first_token_timeout_ms"
# A scheduler that ends a request in time is not overtaken.
_GRACE_MS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Limits of one request.

    Attributes:
        started_at: When it came, monotonic seconds.
        timeout_ms: From then to its end.
        first_token_timeout_ms: From then to the first token of every choice; 0 is any time.
    """

    started_at: float
    timeout_ms: int
    first_token_timeout_ms: int = 0

    def error_at(self, now: float, *, has_first_tokens: bool) -> RequestError | None:
        """Why the request ends now; None while it has time."""
        passed_ms = (now - self.started_at) * 1000
        first_ms = 0 if has_first_tokens else self.first_token_timeout_ms
        if first_ms and passed_ms >= first_ms + _GRACE_MS:
            return self._late(is_first=True)
        return self._late(is_first=False) if passed_ms >= self.timeout_ms else None

    def named(self, error: RequestError) -> RequestError:
        """An end by time with the limit of the request: its scheduler knows what was left of it."""
        if error.reason is not FailureReason.DEADLINE_EXCEEDED:
            return error
        return self._late(is_first=error.field == FIRST_TOKEN_FIELD)

    def _late(self, *, is_first: bool) -> RequestError:
        text = f"the time limit of the request is over: {self.timeout_ms} ms"
        if is_first:
            text = f"no first token within {self.first_token_timeout_ms} ms"
        field = FIRST_TOKEN_FIELD if is_first else None
        return RequestError(FailureReason.DEADLINE_EXCEEDED, text, field=field)
