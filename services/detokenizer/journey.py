"""One request on its way over schedulers: what each of its sequences has had, and where it runs.

A request is given to one scheduler as a leg. When that is lost, what has not ended is given to
another one, with its prompt, the tokens that came so far and the time that is left: everything
that depends on an output's position (random numbers, penalties, limits, grammars) is a function of
those. The request itself, the listener, hears of one scheduler that was never lost.

Laws
- Every token is told once: a leg goes on behind the tokens that came, and nothing is heard of a
  leg that was left.
- Counts and times are those of the whole way. What the first leg told of its start stands.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from services.detokenizer.messages import SequenceFinished, SequenceSpec, TokenSubmit, label_of
from services.detokenizer.placement import Newcomer
from services.detokenizer.ports import SequenceListener
from services.detokenizer.time_limits import FIRST_TOKEN_FIELD
from shared.errors import FailureReason, RequestError
from shared.sampling import SequenceStats, TokenLogprobs

# Of a request's id, with its attempt, where the number of a leg follows.
MAX_ID_BYTES: Final = 120
MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0


@dataclass(slots=True, eq=False)
class Track:
    """One sequence of a journey.

    Attributes:
        position: In the request.
        spec: As it was submitted.
        ids: Output tokens so far.
        name: By which its listener knows it.
        leg: Where it runs; None while it waits for a scheduler, and at its end.
        stream_id: At its leg's scheduler.
        is_over: Whether its listener wants no more.
        is_admitted: Whether its listener knows that.
        start: What was told with its first tokens.
        first_token_at: When they came, by our clock; None before.
        num_drafted: Drafts of all legs.
        num_accepted: Those of them that were kept.
        num_drafted_before: Drafts of legs that were lost.
        num_accepted_before: Those of them that were kept.
    """

    position: int
    spec: SequenceSpec
    ids: "array[int]"
    name: int = 0
    leg: "Leg | None" = None
    stream_id: int = 0
    is_over: bool = False
    is_admitted: bool = False
    start: SequenceStats | None = None
    first_token_at: float | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_drafted_before: int = 0
    num_accepted_before: int = 0

    def leave(self) -> None:
        """Its leg is no more."""
        self.leg = None
        self.num_drafted_before, self.num_accepted_before = self.num_drafted, self.num_accepted

    @property
    def waits(self) -> bool:
        """Whether it needs a scheduler."""
        return self.leg is None and not self.is_over

    def whole(self, stats: SequenceStats, started_at: float, now: float) -> SequenceStats:
        """The stats of a leg as those of the whole way, which began at `started_at`."""
        start, leg = self.start, self.leg
        if leg is None or not leg.number:
            return stats
        stats = replace(
            stats,
            num_drafted_tokens=stats.num_drafted_tokens + self.num_drafted_before,
            num_accepted_tokens=stats.num_accepted_tokens + self.num_accepted_before,
        )
        if start is None or self.first_token_at is None:
            lost_us = _microseconds(leg.sent_at - started_at)
            return replace(stats, queue_us=stats.queue_us + lost_us)
        return replace(
            stats,
            num_cached_tokens=start.num_cached_tokens,
            queue_us=start.queue_us,
            prefill_us=start.prefill_us,
            decode_us=_microseconds(now - self.first_token_at),
        )


class Journey:
    """A request, from its submit to the end of its last sequence.

    Args:
        submit: What was asked for.
        listener: Who asked.
        now: Monotonic seconds.
    """

    def __init__(self, submit: TokenSubmit, listener: SequenceListener, now: float) -> None:
        """Every sequence waits for a scheduler."""
        self.submit = submit
        self.listener = listener
        self.started_at = now
        self.tracks = [
            Track(position, spec, array("I", spec.unpack_output()))
            for position, spec in enumerate(submit.sequences)
        ]
        # How its prompt begins, and the model that began to answer it; once they are known.
        self.key: bytes | None = None
        self.model_digest = ""
        self.num_legs = 0
        self.num_losses = 0
        # When what waits has waited too long.
        self.give_up_at = now
        # Those that refused it in this round, and why the last of them did.
        self.refused_by: set[int] = set()
        self.refusal: RequestError | None = None
        # Who was refused by everybody asks again after a pause, twice as long each time.
        self.pause_s = 0.0
        self.not_before = 0.0

    @property
    def waiting(self) -> list[Track]:
        """Sequences that need a scheduler."""
        return [track for track in self.tracks if track.waits]

    @property
    def label(self) -> str:
        """What the next leg is called at its scheduler, where an earlier one may still live."""
        request_id = self.submit.request_id
        if not self.num_legs:
            return request_id
        return f"{label_of(request_id, MAX_ID_BYTES)}~{self.num_legs}"

    def left(self, tracks: Sequence[Track], now: float) -> TokenSubmit:
        """What is left to do of some sequences.

        Raises:
            RequestError: Their time is over.
        """
        submit = self.submit
        timeout_ms, first_ms = self.check_time(tracks, now)
        has_tokens = all(track.ids for track in tracks)
        sampling = submit.sampling
        if has_tokens:  # what the prompt is worth was told before the first token
            sampling = replace(sampling, num_prompt_logprobs=None)
        return replace(
            submit,
            request_id=self.label,
            sequences=tuple(
                replace(track.spec, output_token_ids=track.ids.tobytes()) for track in tracks
            ),
            sampling=sampling,
            timeout_ms=timeout_ms,
            first_token_timeout_ms=first_ms,
        )

    def check_time(self, tracks: Sequence[Track], now: float) -> tuple[int, int]:
        """What is left of the limits of some sequences, in ms: for all, and for first tokens.

        Raises:
            RequestError: Their time is over.
        """
        submit = self.submit
        first_ms = 0 if all(track.ids for track in tracks) else submit.first_token_timeout_ms
        elapsed_ms = int((now - self.started_at) * 1000)
        return (
            _left_of(submit.timeout_ms, elapsed_ms, "the time limit is over after"),
            _left_of(first_ms, elapsed_ms, "no first token within", FIRST_TOKEN_FIELD),
        )

    def newcomer(self, tracks: Sequence[Track]) -> Newcomer:
        """What some sequences bring; a prompt that several of them share is computed once."""
        prompts = [track.spec.prompt_token_ids for track in tracks]
        if len(prompts) > 1:  # else there is nothing to look for in what may be megabytes
            prompts = list(dict.fromkeys(prompts))
        num_output_tokens = sum(len(track.ids) for track in tracks)
        return Newcomer(
            num_sequences=len(tracks),
            num_tokens=sum(map(len, prompts)) // 4 + num_output_tokens,
        )

    def lose(self, now: float, limit_s: float) -> None:
        """A leg is gone; what waits may do so for a while."""
        self.num_losses += 1
        self.pause_s = self.not_before = 0.0
        self.give_up_at = now + limit_s

    def run(self) -> None:
        """It was taken: refusals are past."""
        self.refusal = None
        self.refused_by.clear()

    def ask_later(self, now: float) -> None:
        """Nobody took it: all may be asked again, after a pause."""
        if self.refused_by:
            self.refused_by.clear()
            self.pause_s = min(MAX_PAUSE_S, max(MIN_PAUSE_S, 2 * self.pause_s))
            self.not_before = now + self.pause_s


class LegOwner(Protocol):
    """Who gives sequences to schedulers."""

    def now(self) -> float:
        """Monotonic seconds."""

    def leg_admitted(self, leg: "Leg") -> None:
        """Its scheduler took it; told once."""

    def leg_refused(self, leg: "Leg", refusal: RequestError) -> None:
        """Its scheduler did not take it; told once."""

    def track_lost(self, leg: "Leg", track: Track) -> None:
        """Its scheduler is gone."""

    def goes_on(self, leg: "Leg", error: RequestError) -> bool:
        """Whether a sequence that ends so at this scheduler goes on at another one."""

    def track_over(self, track: Track) -> None:
        """It has had its end."""


class Leg:
    """Sequences of a journey at one scheduler: a `LossListener` that keeps what they have had."""

    __slots__ = (
        "_is_judged",
        "_owner",
        "_tell_tokens",
        "is_lost",
        "journey",
        "number",
        "peer",
        "sent_at",
        "tracks",
    )

    def __init__(
        self, journey: Journey, tracks: Sequence[Track], peer: int, owner: LegOwner, now: float
    ) -> None:
        """Begin, at the scheduler of number `peer`."""
        self.journey = journey
        self.tracks = tuple(tracks)
        self.peer = peer
        self.number = journey.num_legs
        self.sent_at = now
        self.is_lost = False
        self._owner = owner
        self._is_judged = False
        self._tell_tokens = journey.listener.on_tokens
        journey.num_legs += 1
        for track in tracks:
            track.leg = self

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs here any more."""
        return all(track.leg is not self for track in self.tracks)

    # ---- ports.LossListener ----

    def on_verdict(self, position: int, refusal: RequestError | None) -> None:
        """Its scheduler decides on the leg as a whole, with a verdict for each sequence."""
        is_first, self._is_judged = not self._is_judged, True
        if refusal is not None:
            if self.tracks[position].leg is self:
                self._owner.leg_refused(self, refusal)
            return
        if is_first:
            self._owner.leg_admitted(self)
        track = self.tracks[position]
        if not track.is_admitted:
            track.is_admitted = True
            self.journey.listener.on_verdict(track.position, None)
        if self.journey.num_losses:
            self.journey.listener.on_resumed(track.position, len(track.ids))

    def on_start(self, position: int, stats: SequenceStats) -> None:
        """The first start of a sequence is the one that counts."""
        track = self.tracks[position]
        if track.start is None:
            now = self._owner.now()
            told = track.whole(stats, self.journey.started_at, now)
            track.start, track.first_token_at = told, now
            self.journey.listener.on_start(track.position, told)

    def on_drafts(self, position: int, num_drafted: int, num_accepted: int) -> None:
        """Those of all legs."""
        track = self.tracks[position]
        track.num_drafted = track.num_drafted_before + num_drafted
        track.num_accepted = track.num_accepted_before + num_accepted
        listener = self.journey.listener
        listener.on_drafts(track.position, track.num_drafted, track.num_accepted)

    def on_tokens(
        self,
        position: int,
        num_previous: int,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
    ) -> None:
        """Keep them, and pass them on."""
        track = self.tracks[position]
        track.ids.extend(ids)
        self._tell_tokens(track.position, num_previous, ids, logprobs)

    def on_prompt_logprobs(
        self, position: int, start: int, entries: Sequence[TokenLogprobs]
    ) -> None:
        """Pass them on: they come from the beginning whenever a prompt is computed again."""
        self.journey.listener.on_prompt_logprobs(self.tracks[position].position, start, entries)

    def on_end(self, position: int, end: SequenceFinished | RequestError) -> None:
        """The end of the sequence, or of its leg alone."""
        track = self.tracks[position]
        if isinstance(end, RequestError) and self._owner.goes_on(self, end):
            self._owner.track_lost(self, track)
            return
        if isinstance(end, SequenceFinished):
            stats = track.whole(end.stats, self.journey.started_at, self._owner.now())
            end = replace(end, stats=stats)
        self._owner.track_over(track)
        self.journey.listener.on_end(track.position, end)

    def on_lost(self, position: int) -> None:
        """The scheduler is gone."""
        self._owner.track_lost(self, self.tracks[position])

    def on_fault(self, error: RequestError) -> None:
        """A bug of ours."""
        self.journey.listener.on_fault(error)


def _left_of(limit_ms: int, elapsed_ms: int, what: str, field: str | None = None) -> int:
    """What is left of a limit; 0 where there is none."""
    if not limit_ms:
        return 0
    if elapsed_ms >= limit_ms:
        raise RequestError(FailureReason.DEADLINE_EXCEEDED, f"{what} {limit_ms} ms", field=field)
    return limit_ms - elapsed_ms


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
