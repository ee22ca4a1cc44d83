"""Small values for the tests of the scheduler's parts."""

from array import array

from services.scheduler.limits import CoreConfig, Limits
from services.scheduler.messages import SequenceSubmit, Submission
from services.scheduler.outlet import Outlet
from services.scheduler.plan import Capacity
from services.scheduler.sequence import Request, Sequence
from shared.sampling import ReplayScript, SamplingSpec


def capacity(**changes: int) -> Capacity:
    values: dict[str, int] = {
        "num_blocks": 17,
        "block_size_tokens": 4,
        "num_rows": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "vocab_size": 50_000,
    }
    return Capacity(**(values | changes))


def limits(config: CoreConfig | None = None, **changes: int) -> Limits:
    return Limits.of(config or CoreConfig(), capacity(**changes))


def entry(
    num_prompt: int = 5,
    *,
    stream_id: int = 0,
    output: tuple[int, ...] = (),
    replay: ReplayScript | None = None,
) -> SequenceSubmit:
    return SequenceSubmit(
        stream_id=stream_id,
        index=0,
        prompt_token_ids=array("I", range(1 + 100 * stream_id, num_prompt + 1 + 100 * stream_id)),
        output_token_ids=array("I", output),
        seed=stream_id,
        replay=replay,
    )


def submission(*entries: SequenceSubmit, request_id: str = "r", **changes: object) -> Submission:
    sampling = changes.pop("sampling", SamplingSpec(max_tokens=8, eos_token_ids=(7, 8)))
    return Submission(
        request_id=request_id, sequences=entries or (entry(),), sampling=sampling, **changes
    )


def sequence(
    num_prompt: int = 5,
    *,
    outlet: Outlet | None = None,
    stream_id: int = 0,
    arrived_at: float = 0.0,
) -> Sequence:
    submit = submission(entry(num_prompt, stream_id=stream_id), traceparent="00-a-b-01")
    return Sequence(
        Request(submit),
        Outlet() if outlet is None else outlet,
        submit.sequences[0],
        submit.sampling,
        arrived_at,
    )
