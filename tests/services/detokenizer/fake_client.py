"""A scheduler without a connection: a `SchedulerClient` whose sequences the test moves on.

Its tokens are a function of the seed and the place alone, as those of real schedulers are.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

from services.detokenizer.messages import SequenceFinished, SequenceSpec, TokenSubmit
from services.detokenizer.placement import PlacementRules
from services.detokenizer.ports import LossListener
from services.detokenizer.schedulers import ResumeLimits, Schedulers
from shared.endings import AbortReason, FinishReason
from shared.errors import FailureReason, RequestError
from shared.rpc_link import Silence
from shared.sampling import LoadSnapshot, SamplingSpec, SequenceStats
from shared.wire import pack_ids

MAX_TOKENS = 12


def token_at(seed: int, place: int) -> int:
    """The output token of an undisturbed run."""
    return (seed * 7919 + place * 104_729) % 50_000


@dataclass
class Running:
    """A sequence at a scheduler."""

    listener: LossListener
    position: int
    seed: int
    max_tokens: int
    num_tokens: int
    num_own_tokens: int = 0


@dataclass
class FakeClient:
    """One scheduler; it is reached and admits everything unless told otherwise."""

    is_connected: bool = True
    refusal: RequestError | None = None
    submits: list[TokenSubmit] = field(default_factory=list)
    running: dict[int, Running] = field(default_factory=dict)
    waiting: list[tuple[list[int], LossListener, TokenSubmit]] = field(default_factory=list)
    aborts: list[tuple[int, AbortReason, int]] = field(default_factory=list)
    silence: Silence = field(default_factory=Silence)
    num_drops: int = 0
    last_id: int = 0

    def submit(self, submit: TokenSubmit, listener: LossListener) -> list[int]:
        assert self.is_connected
        self.submits.append(submit)
        ids = []
        for _ in submit.sequences:
            self.last_id += 1
            ids.append(self.last_id)
        self.waiting.append((ids, listener, submit))
        return ids

    def abort(self, stream_id: int, reason: AbortReason, num_tokens_kept: int = 0) -> None:
        self.aborts.append((stream_id, reason, num_tokens_kept))
        self.running.pop(stream_id, None)
        for ids, _, _ in self.waiting:
            ids[:] = [0 if i == stream_id else i for i in ids]

    def drop(self) -> None:
        self.num_drops += 1

    async def reset_cache(self) -> int:
        if not self.is_connected:
            raise RequestError(FailureReason.UPSTREAM_LOST, "the scheduler cannot be reached")
        return 3

    def answer(self) -> None:
        """A verdict for everything that was submitted."""
        waiting, self.waiting = self.waiting, []
        for ids, listener, submit in waiting:
            for position, (i, spec) in enumerate(zip(ids, submit.sequences, strict=True)):
                if not i:
                    continue
                listener.on_verdict(position, self.refusal)
                if self.refusal is None:
                    count = len(spec.output_token_ids) // 4
                    most = submit.sampling.max_tokens
                    self.running[i] = Running(listener, position, spec.seed, most, count)

    def step(self, count: int = 1) -> None:
        """So many tokens of every sequence; those that are complete end."""
        for stream_id, one in list(self.running.items()):
            if stream_id not in self.running:  # ended by what another one brought about
                continue
            until = min(one.num_tokens + count, one.max_tokens)
            ids = [token_at(one.seed, place) for place in range(one.num_tokens, until)]
            previous, one.num_tokens = one.num_tokens, until
            stats = SequenceStats(
                num_cached_tokens=len(self.submits),
                queue_us=1,
                num_output_tokens=until,
                num_drafted_tokens=one.num_own_tokens + len(ids),
                num_accepted_tokens=one.num_own_tokens,
            )
            if not one.num_own_tokens:
                one.listener.on_start(one.position, stats)
            one.num_own_tokens += len(ids)
            one.listener.on_drafts(
                one.position, stats.num_drafted_tokens, stats.num_accepted_tokens
            )
            one.listener.on_tokens(one.position, previous, ids, None)
            if until == one.max_tokens and self.running.pop(stream_id, None):
                reason = FinishReason.LENGTH
                end = SequenceFinished(reason=reason, stop_token_id=None, stats=stats)
                one.listener.on_end(one.position, end)

    def fail_all(self, error: RequestError) -> None:
        """As a scheduler does that stops."""
        running, self.running = self.running, {}
        for one in running.values():
            one.listener.on_end(one.position, error)

    def take_lost(self) -> list[tuple[LossListener, int]]:
        """Forget everything, as a connection that breaks does."""
        lost = [(one.listener, one.position) for one in self.running.values()]
        for ids, listener, _ in self.waiting:
            lost += [(listener, position) for position, i in enumerate(ids) if i]
        self.running, self.waiting = {}, []
        return lost


@dataclass
class Asker:
    """A request that remembers what it heard; checks that nothing is missing or comes twice."""

    seeds: list[int]
    tokens: list["array[int]"] = field(default_factory=list)
    verdicts: dict[int, RequestError | None] = field(default_factory=dict)
    ends: dict[int, SequenceFinished | RequestError] = field(default_factory=dict)
    starts: dict[int, SequenceStats] = field(default_factory=dict)
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)
    resumed: list[tuple[int, int]] = field(default_factory=list)
    faults: list[RequestError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [array("I") for _ in self.seeds]

    def on_verdict(self, position: int, refusal: RequestError | None) -> None:
        assert position not in self.verdicts, "two verdicts"
        self.verdicts[position] = refusal

    def on_start(self, position: int, stats: SequenceStats) -> None:
        assert position not in self.starts, "two starts"
        self.starts[position] = stats

    def on_drafts(self, position: int, num_drafted: int, num_accepted: int) -> None:
        self.drafts[position] = num_drafted, num_accepted

    def on_tokens(self, position: int, num_previous: int, ids: Any, logprobs: Any) -> None:
        assert num_previous == len(self.tokens[position]), "a gap, or a token twice"
        assert position not in self.ends, "tokens after the end"
        self.tokens[position].extend(ids)
        del logprobs

    def on_prompt_logprobs(self, position: int, start: int, entries: Any) -> None:
        """None are asked for."""

    def on_end(self, position: int, end: SequenceFinished | RequestError) -> None:
        assert position not in self.ends, "two ends"
        self.ends[position] = end

    def on_resumed(self, position: int, num_tokens: int) -> None:
        self.resumed.append((position, num_tokens))

    def on_fault(self, error: RequestError) -> None:
        self.faults.append(error)

    def check_whole(self, max_tokens: int) -> None:
        """Every sequence has the tokens of an undisturbed run, and a good end."""
        for position, seed in enumerate(self.seeds):
            assert list(self.tokens[position]) == [token_at(seed, i) for i in range(max_tokens)]
            end = self.ends[position]
            assert isinstance(end, SequenceFinished), end
            assert end.stats.num_output_tokens == max_tokens


class Fleet:
    """`Schedulers` over fake ones; the test is the clock."""

    def __init__(self, count: int = 2, **options: Any) -> None:
        self.time = 0.0
        self.reached: list[bool] = []
        self.loads: list[LoadSnapshot] = []
        self.schedulers = Schedulers(
            [f"unix:/s{n}" for n in range(count)],
            PlacementRules(),
            ResumeLimits(**options),
            on_reach=self.reached.append,
            on_load=self.loads.append,
            now=lambda: self.time,
        )
        self.clients = [FakeClient(is_connected=False) for _ in range(count)]
        self.num_runs = [0] * count
        for peer, client in zip(self.schedulers.peers, self.clients, strict=True):
            peer.client = client  # type: ignore[assignment]  # the part of it that is used
        for number in range(count):
            self.start(number)

    def start(self, number: int, **load: Any) -> None:
        """A scheduler is reached, as another run of itself."""
        self.num_runs[number] += 1
        self.clients[number].is_connected = True
        self.schedulers.peers[number]._take_state(True)
        self.tell(number, **load)

    def tell(self, number: int, **load: Any) -> None:
        """A snapshot of a scheduler that waits for work."""
        told: dict[str, Any] = {
            "is_worker_ready": True,
            "instance_id": f"{number}.{self.num_runs[number]}",
            "model_digest": "m",
            "block_size_tokens": 4,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            **load,
        }
        self.schedulers.peers[number]._take_load(LoadSnapshot(**told))

    def lose(self, number: int) -> None:
        """The connection to a scheduler breaks."""
        client = self.clients[number]
        client.is_connected = False
        lost = client.take_lost()
        self.schedulers.peers[number]._take_state(False)
        for listener, position in lost:
            listener.on_lost(position)

    def step(self, count: int = 1) -> None:
        """What waits is placed and answered; tokens for all."""
        self.schedulers.resume_waiting()
        for client in self.clients:
            client.answer()
        for client in self.clients:
            client.step(count)

    @property
    def num_live(self) -> int:
        """Sequences that are known."""
        return len(self.schedulers._tracks)


def request(
    seeds: list[int], *, prompt: list[int] | None = None, name: str = "r", **fields: Any
) -> TokenSubmit:
    return TokenSubmit(
        request_id=name,
        sequences=tuple(
            SequenceSpec(index=i, prompt_token_ids=pack_ids(prompt or [1, 2, 3]), seed=seed)
            for i, seed in enumerate(seeds)
        ),
        sampling=SamplingSpec(max_tokens=MAX_TOKENS),
        **fields,
    )


def ask(fleet: Fleet, seeds: list[int], **fields: Any) -> tuple[Asker, list[int]]:
    asker = Asker(seeds)
    return asker, fleet.schedulers.submit(request(seeds, **fields), asker)
