"""All live requests of this process, whichever door they came in by."""

from services.detokenizer.response import Response
from shared.errors import FailureReason, RequestError


class LiveRequests:
    """Who is live, under which label; refuses newcomers while the service drains."""

    def __init__(self) -> None:
        """Start empty and open."""
        self._responses: dict[int, Response] = {}
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._responses)

    def check_open(self) -> None:
        """Raise DRAINING when no new request may come in."""
        if self.is_draining:
            raise RequestError(
                FailureReason.DRAINING, "the service is shutting down", retry_after_ms=1000
            )

    def add(self, response: Response) -> None:
        """A request begins."""
        self._responses[id(response)] = response

    def discard(self, response: Response) -> None:
        """A request is over and told."""
        self._responses.pop(id(response), None)

    def abort(self, request_id: str) -> int:
        """End every live request with this label; returns how many there were."""
        found = [
            response
            for response in self._responses.values()
            if response.request_id == request_id and not response.is_over
        ]
        for response in found:
            response.abort(RequestError(FailureReason.CANCELLED, "the request was aborted"))
        return len(found)

    def abort_all(self, error: RequestError) -> None:
        """End everything, at the end of a drain."""
        for response in list(self._responses.values()):
            response.abort(error)
