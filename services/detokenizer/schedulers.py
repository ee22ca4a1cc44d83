"""All schedulers as one that is never lost for long: the `Upstream` of every request.

A request goes to the scheduler that `placement.py` chooses, and to the next one where it is refused
for reasons of that scheduler alone. When a scheduler is lost (its connection breaks, it says
nothing for too long, it ends what runs because it stops or has no worker any more), its sequences
are given to another, or to itself once it is back, from what they have had so far (`journey.py`).
Both the time that they wait and the number of losses are bounded; past that the request ends with
UPSTREAM_LOST.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Final

from services.detokenizer.faults import internal_error
from services.detokenizer.journey import Journey, Leg, Track
from services.detokenizer.messages import TokenSubmit
from services.detokenizer.peer import SchedulerPeer
from services.detokenizer.placement import (
    PlacementRules,
    SchedulerWork,
    choose_scheduler,
    prompt_key,
)
from services.detokenizer.ports import SequenceListener
from services.detokenizer.summed_load import SummedLoad
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.rpc_link import RETRY_AFTER_MS
from shared.sampling import LoadSnapshot

# What waits for a scheduler is looked at so often, beside whenever something changes.
RETRY_S: Final = 0.1
LOOK_S: Final = 0.25
# A refusal for one of these says something about the scheduler, not about the request.
MOVABLE: Final = frozenset(
    {FailureReason.DRAINING, FailureReason.UPSTREAM_LOST, FailureReason.QUEUE_FULL}
)
# Who may get a request, from those that serve to those that at least can say why they do not.
_WILLING: Final[tuple[Callable[[SchedulerPeer], bool], ...]] = (
    attrgetter("is_ready"),
    attrgetter("is_open"),
    attrgetter("is_reached"),
)

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLimits:
    """How long and how often a sequence is tried again.

    Attributes:
        wait_s: For a scheduler that takes it, after each loss; 0 tries nothing again.
        max_losses: Losses of one request that are made good.
        silence_s: A scheduler that says nothing for so long is lost.
    """

    wait_s: float = 30.0
    max_losses: int = 3
    silence_s: float = 5.0


class Schedulers:
    """An `Upstream`, and a `LegOwner`.

    Args:
        addresses: Where the schedulers listen.
        rules: Of placement.
        limits: Of resumption.
        on_reach: Told true when a first one is reached, false when none is any more.
        on_load: Told the sum of all snapshots, whenever one changes.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rules: PlacementRules,
        limits: ResumeLimits,
        *,
        on_reach: Callable[[bool], None],
        on_load: Callable[[LoadSnapshot], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with none reached; `run` connects."""
        self._rules = rules
        self._limits = limits
        self._on_reach = on_reach
        self._on_load = on_load
        self.now = now
        # Names this run: what it counts begins with it.
        self.instance_id = uuid.uuid4().hex
        self.peers = [
            SchedulerPeer(
                address,
                on_state=partial(self._take_state, number),
                on_load=partial(self._take_load, number),
            )
            for number, address in enumerate(addresses)
        ]
        self._summed = SummedLoad(len(self.peers))
        self._counts = LoadSnapshot()
        self._tracks: dict[int, tuple[Journey, Track]] = {}
        self._last_name = 0
        # Journeys with sequences that wait for a scheduler, in the order of their loss.
        self._waiting: dict[Journey, None] = {}
        self._due = asyncio.Event()

    @property
    def is_reached(self) -> bool:
        """Whether there is a scheduler at all."""
        return any(peer.is_reached for peer in self.peers)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a scheduler to go on at."""
        return len(self._waiting)

    async def run(self) -> None:
        """Keep connected, and what is lost going on, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for peer in self.peers:
                tasks.create_task(peer.client.run())
            tasks.create_task(self._keep_resuming())
            tasks.create_task(self._keep_looking())

    # ---- ports.Upstream ----

    def submit(self, submit: TokenSubmit, listener: SequenceListener) -> list[int]:
        """Send a request to the scheduler that suits it best."""
        journey = Journey(submit, listener, self.now())
        if not self._send(journey, journey.tracks):
            raise RequestError(
                FailureReason.UPSTREAM_LOST,
                "the scheduler cannot be reached"
                if len(self.peers) == 1
                else f"none of {len(self.peers)} schedulers can be reached",
                retry_after_ms=RETRY_AFTER_MS,
            )
        for track in journey.tracks:
            self._last_name += 1
            track.name = self._last_name
            self._tracks[track.name] = journey, track
        return [track.name for track in journey.tracks]

    def abort(self, name: int, reason: AbortReason, num_tokens_kept: int = 0) -> None:
        """End a sequence, wherever it is."""
        found = self._tracks.get(name)
        if found is None:
            return
        _, track = found
        if track.leg is not None:
            client = self.peers[track.leg.peer].client
            client.abort(track.stream_id, reason, num_tokens_kept)
        self.track_over(track)

    async def reset_cache(self) -> int:
        """Ask every scheduler; those that are reached do it even if others are not."""
        answers = await asyncio.gather(
            *(peer.client.reset_cache() for peer in self.peers if not peer.is_twin),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return sum(answer for answer in answers if isinstance(answer, int))

    # ---- journey.LegOwner ----

    def leg_admitted(self, leg: Leg) -> None:
        """The next snapshot counts it."""
        self.peers[leg.peer].credit.answer(leg)
        leg.journey.run()

    def leg_refused(self, leg: Leg, refusal: RequestError) -> None:
        """Try another one, now or later, or pass the refusal on."""
        journey, peer = leg.journey, self.peers[leg.peer]
        peer.credit.remove(leg)
        for track in leg.tracks:
            if track.leg is leg:
                peer.client.abort(track.stream_id, AbortReason.CANCELLED)
                track.leave()
        journey.refused_by.add(leg.peer)
        journey.refusal = refusal
        if journey.num_losses:
            self._wait(journey)
        elif refusal.reason not in MOVABLE or not self._send_elsewhere(journey):
            waiting = journey.waiting
            for track in waiting:
                self.track_over(track)
            if waiting:
                journey.listener.on_verdict(waiting[0].position, refusal)

    def track_lost(self, leg: Leg, track: Track) -> None:
        """It waits for a scheduler to go on at."""
        if track.leg is not leg:
            return
        track.leave()
        journey = leg.journey
        if not leg.is_lost:
            leg.is_lost = True
            journey.lose(self.now(), self._limits.wait_s)
            # One that is still there said good-bye.
            journey.refused_by = {leg.peer} if self.peers[leg.peer].is_reached else set()
        if leg.is_empty:
            self.peers[leg.peer].credit.remove(leg)
        self._wait(journey)

    def goes_on(self, leg: Leg, error: RequestError) -> bool:
        """Where a scheduler stops; where it has no worker any more only if another one has."""
        if not self._limits.wait_s:
            return False
        if error.reason is FailureReason.DRAINING:
            return True
        return error.may_go_on and any(
            peer.is_ready and peer.serves(leg.journey.model_digest)
            for number, peer in enumerate(self.peers)
            if number != leg.peer
        )

    def track_over(self, track: Track) -> None:
        """Forget a sequence."""
        self._tracks.pop(track.name, None)
        leg, track.leg, track.is_over = track.leg, None, True
        if leg is not None and leg.is_empty:
            self.peers[leg.peer].credit.remove(leg)

    # ---- placing ----

    def _send(self, journey: Journey, tracks: Sequence[Track]) -> bool:
        """Give sequences to a scheduler; False when there is none for them.

        Raises:
            RequestError: They cannot be sent at all.
        """
        now, newcomer = self.now(), journey.newcomer(tracks)
        works = self._candidates(journey)
        if sum(work is not None for work in works) > 1 and journey.key is None:
            journey.key = self._key_of(journey)
        number = choose_scheduler(journey.key or b"", newcomer, works, self._rules)
        if number is None:
            return False
        peer = self.peers[number]
        submit = journey.left(tracks, now)
        leg = Leg(journey, tracks, number, self, now)
        try:
            stream_ids = peer.client.submit(submit, leg)
        except RequestError:
            for track in tracks:
                track.leave()
            raise
        peer.credit.add(leg, newcomer)
        for track, stream_id in zip(tracks, stream_ids, strict=True):
            track.stream_id = stream_id
        if not journey.model_digest and peer.load is not None:
            journey.model_digest = peer.load.model_digest
        return True

    def _candidates(self, journey: Journey) -> list[SchedulerWork | None]:
        """Work of each scheduler that may get it.

        Something new goes to one that is not ready where no other is: it may be so in a moment, and
        knows best how to refuse. What was refused by one that is, or was lost, goes to nobody else;
        what was lost only to one with the same model.
        """
        is_new = not journey.num_losses
        for is_good in _WILLING if is_new and not journey.refused_by else _WILLING[:1]:
            works = [
                peer.work()
                if is_good(peer)
                and not peer.is_twin
                and number not in journey.refused_by
                and (is_new or peer.serves(journey.model_digest))
                else None
                for number, peer in enumerate(self.peers)
            ]
            if any(works):
                return works
        return []

    def _key_of(self, journey: Journey) -> bytes:
        loads = [peer.load for peer in sorted(self.peers, key=lambda peer: peer.address)]
        known = next((load for load in loads if load and load.block_size_tokens), LoadSnapshot())
        submit = journey.submit
        return prompt_key(
            submit.cache_salt,
            submit.sequences[0].prompt_token_ids,
            known.model_digest,
            known.block_size_tokens,
            self._rules.num_blocks,
        )

    def _send_elsewhere(self, journey: Journey) -> bool:
        with contextlib.suppress(RequestError):
            return self._send(journey, journey.waiting)
        return False

    # ---- going on ----

    def _wait(self, journey: Journey) -> None:
        self._waiting[journey] = None
        self._due.set()

    async def _keep_resuming(self) -> None:
        """Look at what waits whenever something changes; losses of a moment are one."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._waiting else None):
                    await self._due.wait()
            self._due.clear()
            self.resume_waiting()

    def resume_waiting(self) -> None:
        """Give what waits to schedulers, and up what has waited too long."""
        now = self.now()
        num_sent = num_given_up = 0
        for journey in list(self._waiting):
            tracks = journey.waiting
            error = self._try_again(journey, tracks, now) if tracks else None
            if error is not None:
                num_given_up += len(tracks)
                for track in tracks:
                    self.track_over(track)
                # It ends what runs of it elsewhere.
                journey.listener.on_end(tracks[0].position, error)
            elif not journey.waiting:
                num_sent += len(tracks)
            if not journey.waiting:
                self._waiting.pop(journey, None)
        if num_sent or num_given_up:
            self._count(num_resubmissions_total=num_sent, num_unresumed_total=num_given_up)

    def _try_again(
        self, journey: Journey, tracks: Sequence[Track], now: float
    ) -> RequestError | None:
        """Give sequences to a scheduler if one takes them; why they cannot go on any more."""
        try:
            journey.check_time(tracks, now)  # also where nobody is there to take them
            error = self._end_of_patience(journey, now)
            if error is not None or now < journey.not_before:
                return error
            if not self._send(journey, tracks):
                journey.ask_later(now)
        except RequestError as failure:
            return failure
        except Exception as bug:  # noqa: BLE001  # one request may fail, the others may not
            return internal_error(bug, journey.submit.request_id)
        return None

    def _end_of_patience(self, journey: Journey, now: float) -> RequestError | None:
        """The error of a journey that was lost too often, or has waited too long."""
        limits, text = self._limits, "the scheduler was lost"
        if journey.num_losses > limits.max_losses:
            text += f" {journey.num_losses} times" if limits.max_losses else ""
        elif now < journey.give_up_at:
            return None
        elif limits.wait_s:
            text += f", and none took the request again within {limits.wait_s:g} s"
        if journey.refusal is not None:
            text += f": {journey.refusal.message}"
        return RequestError(FailureReason.UPSTREAM_LOST, text, retry_after_ms=RETRY_AFTER_MS)

    # ---- what peers tell ----

    def _take_state(self, number: int, is_reached: bool) -> None:
        num_reached = sum(peer.is_reached for peer in self.peers)
        if is_reached:
            # Its first snapshot says the rest.
            if num_reached == 1:
                self._on_reach(True)
            return
        self._summed.lose(number)
        if not num_reached:
            self._on_reach(False)
        self._count(num_scheduler_losses_total=1)

    def _take_load(self, number: int, load: LoadSnapshot) -> None:
        if self._is_left_out(number, load):
            self._summed.lose(number)
        elif self._summed.take(number, load):
            address = self.peers[number].address
            _logger.warning("scheduler is another run of itself", extra={"address": address})
        self._tell_load()
        if self._waiting:
            self._due.set()

    def _is_left_out(self, number: int, load: LoadSnapshot) -> bool:
        """Whether this run is reached at another address, too, which spoke first."""
        peer = self.peers[number]
        known = [
            other.address
            for other in self.peers
            if other is not peer
            and other.is_reached
            and not other.is_twin
            and other.load is not None
            and other.load.instance_id == load.instance_id
        ]
        was_twin, peer.is_twin = peer.is_twin, bool(load.instance_id and known)
        if peer.is_twin and not was_twin:
            text = "the scheduler at %s is the one at %s, left out: give each one address"
            _logger.warning(text, peer.address, known[0])
        return peer.is_twin

    def _count(self, **counts: int) -> None:
        changed = {name: getattr(self._counts, name) + count for name, count in counts.items()}
        self._counts = replace(self._counts, **changed)
        self._tell_load()

    def _tell_load(self) -> None:
        counts = self._counts
        self._on_load(
            replace(
                self._summed.sum(),
                num_scheduler_losses_total=counts.num_scheduler_losses_total,
                num_resubmissions_total=counts.num_resubmissions_total,
                num_unresumed_total=counts.num_unresumed_total,
                instance_id=self.instance_id,
            )
        )

    async def _keep_looking(self) -> None:
        """Give up schedulers that stand still: no connection breaks by that."""
        while True:
            await asyncio.sleep(LOOK_S)
            for peer in self.peers:
                if peer.look() * LOOK_S >= self._limits.silence_s:
                    _logger.warning("scheduler says nothing", extra={"address": peer.address})
                    peer.client.drop()
