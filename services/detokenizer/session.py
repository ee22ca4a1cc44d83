"""One frontend process and its requests: messages in, one message per step out.

No sockets and no clock. `handle` takes what the frontend sent, `collect` gives what there is to
say; `wake` is called when that is more than nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from services.detokenizer.build import (
    BuildContext,
    build_presenter,
    build_response,
    upstream_submit,
)
from services.detokenizer.delivery import Delivery, Output, ReaderLimits
from services.detokenizer.faults import internal_error
from services.detokenizer.live import LiveRequests
from services.detokenizer.messages import TextEnd, TextSubmit
from services.detokenizer.ports import Upstream
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from shared.sampling import LoadSnapshot

# A frontend hears something at least so often, but for the pace of ticks.
SIGN_INTERVAL_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """What one message of the frontend says; `credits` maps stream ids to bytes."""

    submits: Sequence["StreamSubmit"] = ()
    aborted_stream_ids: Sequence[int] = ()
    credits: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSubmit:
    """A request under the name that the frontend gives it; `submit` may be unreadable already."""

    stream_id: int
    submit: TextSubmit | RequestError
    initial_credit_bytes: int = 0


@dataclass(slots=True)
class Outgoing:
    """What one message to the frontend says."""

    verdicts: list[tuple[int, RequestError | None]] = field(default_factory=list)
    frames: list[tuple[int, bytes]] = field(default_factory=list)
    ends: list[tuple[int, TextEnd]] = field(default_factory=list)
    load: LoadSnapshot | None = None
    # Told with whatever else there is to say, and once by itself.
    is_draining: bool = False
    is_first: bool = False
    is_news: bool = False

    def __bool__(self) -> bool:
        return bool(self.verdicts or self.frames or self.ends or self.load or self.is_news)


class Session:
    """The requests of one connection."""

    def __init__(
        self,
        context: BuildContext,
        upstream: Upstream,
        live: LiveRequests,
        limits: ReaderLimits,
        wake: Callable[[], None],
    ) -> None:
        """Start without requests."""
        self._context = context
        self._upstream = upstream
        self._live = live
        self._limits = limits
        self._wake = wake
        self._deliveries: dict[int, Delivery] = {}
        self._changed: dict[int, None] = {}
        self._refused: list[tuple[int, RequestError]] = []
        self._load: LoadSnapshot | None = None
        self._has_told_drain = False
        self._told_at: float | None = None

    def __len__(self) -> int:
        return len(self._deliveries)

    def handle(self, incoming: Incoming, now: float) -> None:
        """Take a message: submits first, so that an abort in the same message finds its request."""
        for submit in incoming.submits:
            self._submit(submit, now)
        for stream_id, num_bytes in incoming.credits.items():
            delivery = self._deliveries.get(stream_id)
            if delivery is not None and delivery.add_credit(num_bytes):
                self._mark(stream_id)
        for stream_id in incoming.aborted_stream_ids:
            delivery = self._deliveries.get(stream_id)
            if delivery is not None:
                delivery.response.give_up(_cancelled(), AbortReason.CANCELLED)

    def show_load(self, load: LoadSnapshot) -> None:
        """Relay the scheduler's latest snapshot."""
        self._load = load
        self._wake()

    def show_drain(self) -> None:
        """Tell that no new request is taken any more."""
        self._wake()

    def collect(self, now: float) -> Outgoing:
        """Everything there is to say now; may be nothing."""
        is_draining = self._live.is_draining
        outgoing = Outgoing(
            verdicts=list(self._refused),
            load=self._load,
            is_draining=is_draining,
            is_first=self._told_at is None,
            is_news=self._is_sign_due(now) or (is_draining and not self._has_told_drain),
        )
        self._refused, self._load = [], None
        self._has_told_drain = is_draining
        changed, self._changed = self._changed, {}
        for stream_id in changed:
            delivery = self._deliveries.get(stream_id)
            if delivery is not None:
                self._take(stream_id, delivery, outgoing, now)
        if outgoing:
            self._told_at = now
        return outgoing

    def tick(self, now: float) -> None:
        """Look at the clock for every request, and for the next sign of life."""
        for delivery in list(self._deliveries.values()):
            delivery.tick(now)
        if self._is_sign_due(now):
            self._wake()

    def close(self) -> None:
        """The connection is gone: every request on it is aborted."""
        for delivery in self._deliveries.values():
            delivery.response.abort(_cancelled())
            self._live.discard(delivery.response)
        self._deliveries.clear()

    def _is_sign_due(self, now: float) -> bool:
        return self._told_at is None or now - self._told_at >= SIGN_INTERVAL_S

    def _submit(self, incoming: StreamSubmit, now: float) -> None:
        stream_id, submit = incoming.stream_id, incoming.submit
        if isinstance(submit, RequestError):
            self._refuse(stream_id, submit)
            return
        try:
            self._check_free(stream_id)
            response = build_response(submit, self._context, now)
            presenter = build_presenter(response, submit.output, self._context)
            sent = upstream_submit(submit, response, self._context, submit.attempt_id)
        except RequestError as error:
            self._refuse(stream_id, error)
            return
        except Exception as error:  # noqa: BLE001  # one request may fail, the others may not
            self._refuse(stream_id, internal_error(error, submit.request_id))
            return
        self._deliveries[stream_id] = Delivery(
            response,
            presenter,
            self._limits,
            is_stream=submit.output.is_stream,
            credit_bytes=incoming.initial_credit_bytes,
        )
        self._live.add(response)
        response.on_change = partial(self._mark, stream_id)
        response.start(self._upstream, sent)

    def _check_free(self, stream_id: int) -> None:
        self._live.check_open()
        if stream_id in self._deliveries:
            message = f"stream_id {stream_id} is in use"
            raise RequestError(FailureReason.ALREADY_EXISTS, message, field="stream_id")

    def _refuse(self, stream_id: int, error: RequestError) -> None:
        self._refused.append((stream_id, error))
        self._wake()

    def _take(self, stream_id: int, delivery: Delivery, outgoing: Outgoing, now: float) -> None:
        output = self._render(delivery, now)
        if output.has_verdict:
            outgoing.verdicts.append((stream_id, output.refusal))
        if output.frames:
            outgoing.frames.append((stream_id, output.frames))
        if output.end is not None:
            outgoing.ends.append((stream_id, output.end))
        if delivery.is_over:
            del self._deliveries[stream_id]
            self._live.discard(delivery.response)

    def _render(self, delivery: Delivery, now: float) -> Output:
        try:
            return delivery.take(now)
        except Exception as error:  # noqa: BLE001  # one request may fail, the others may not
            delivery.response.abort(internal_error(error, delivery.response.request_id))
            return delivery.take_failure()

    def _mark(self, stream_id: int) -> None:
        changed = self._changed
        if not changed:  # else somebody has been told since the last `collect`
            self._wake()
        changed[stream_id] = None


def _cancelled() -> RequestError:
    return RequestError(FailureReason.CANCELLED, "the client went away")
